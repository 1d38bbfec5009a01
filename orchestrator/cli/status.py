"""`orch status`: sweeps and their progress, or one sweep by state."""

from __future__ import annotations

import click

from orchestrator.cli.output import format_option, print_table
from orchestrator.reports.table import Format


@click.command(name="status")
@click.argument("sweep", required=False)
@format_option
@click.pass_context
def command(ctx: click.Context, sweep: str | None, fmt: Format) -> None:
    """Sweeps and their progress; with SWEEP, its trials that are running, failed or killed."""
    from orchestrator.reports.status import all_sweeps, one_sweep
    from orchestrator.workspace import open_for_reading

    query = open_for_reading(ctx.obj)
    print_table(one_sweep(query, sweep) if sweep else all_sweeps(query), fmt)
