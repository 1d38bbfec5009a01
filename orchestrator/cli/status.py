"""`orch status`: sweeps and their progress, or one sweep by state."""

from __future__ import annotations

import click

from orchestrator.cli.output import format_option, print_table
from orchestrator.reports.table import Format


@click.command(name="status")
@click.argument("sweep", required=False)
@click.option("--spec", "as_spec", is_flag=True, help="Print what SWEEP asks, as a sweep file with nothing left open.")
@format_option
@click.pass_context
def command(ctx: click.Context, sweep: str | None, as_spec: bool, fmt: Format) -> None:
    """Sweeps and their progress; with SWEEP, its trials that are running, failed or killed."""
    from orchestrator.reports.spec_text import spec_text
    from orchestrator.reports.status import all_sweeps, one_sweep
    from orchestrator.workspace import open_workspace

    if as_spec and not sweep:
        raise click.UsageError("--spec  needs the name of a sweep: orch status SWEEP --spec")
    workspace = open_workspace(ctx.obj)
    query = workspace.query
    if as_spec and sweep:
        click.echo(spec_text(query, sweep), nl=False)
        return
    print_table(one_sweep(query, sweep, workspace.is_dead) if sweep else all_sweeps(query), fmt)
