"""`orch doctor`: look at everything a sweep needs and say what is wrong, with the remedy."""

from __future__ import annotations

import click

from orchestrator.cli.output import format_option, print_table
from orchestrator.reports.table import Format


@click.command(name="doctor")
@click.option("--init", is_flag=True, help="Create the tables in a database that already holds other tables.")
@format_option
@click.pass_context
def command(ctx: click.Context, init: bool, fmt: Format) -> int:
    """Find what is wrong here. Exit 1 if something is."""
    from orchestrator.doctor import examine

    table, healthy = examine(ctx.obj, init)
    print_table(table, fmt)
    return 0 if healthy else 1
