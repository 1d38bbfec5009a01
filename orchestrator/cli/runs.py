"""`orch runs`: one line a trial."""

from __future__ import annotations

import click

from orchestrator.cli.output import format_option, print_table
from orchestrator.reports.table import Format


@click.command(name="runs")
@click.argument("sweep")
@click.option("--where", metavar="SQL", help='A condition over sweep_<name>, such as "val/loss" < 0.1.')
@click.option("--sort", metavar="COLUMN", help="Sort by this column; non-finite values come last.")
@click.option("--desc", is_flag=True, help="Largest first.")
@click.option("--limit", type=click.IntRange(min=1))
@format_option
@click.pass_context
def command(
    ctx: click.Context, sweep: str, where: str | None, sort: str | None, desc: bool, limit: int | None, fmt: Format
) -> None:
    """One line a trial of SWEEP. csv and json give every column."""
    from orchestrator.reports.runs import runs
    from orchestrator.workspace import open_for_reading

    print_table(runs(open_for_reading(ctx.obj), sweep, where, sort, desc, limit, whole=fmt != "table"), fmt)
