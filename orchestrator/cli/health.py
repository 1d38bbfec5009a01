"""`orch health`: what probes and checks found in a sweep or a run, worst first, each with what to do."""

from __future__ import annotations

import click

from orchestrator.cli.output import format_option, print_table
from orchestrator.reports.table import Format


@click.command(name="health")
@click.argument("name", metavar="SWEEP_OR_RUN")
@click.option(
    "--severity", type=click.Choice(["info", "warning", "error"]), default="info", help="Leave out what is milder."
)
@format_option
@click.pass_context
def command(ctx: click.Context, name: str, severity: str, fmt: Format) -> None:
    """The findings of a sweep, or of a run: SWEEP/TRIAL, or MLflow's run id or its first 8 characters."""
    from orchestrator.reports.health import health
    from orchestrator.trial import Severity
    from orchestrator.workspace import open_for_reading

    table = health(open_for_reading(ctx.obj), name, Severity(severity))
    if fmt == "table" and not table.rows:
        click.echo(table.title)
        return
    print_table(table, fmt)
