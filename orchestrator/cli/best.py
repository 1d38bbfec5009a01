"""`orch best`: the best finite run and its parameters, or all runs that no other beats in several metrics."""

from __future__ import annotations

from typing import Literal

import click

from orchestrator.cli.output import format_option, print_table
from orchestrator.reports.table import Format


@click.command(name="best")
@click.argument("sweep")
@click.option("--metric", help="Another metric than the sweep's own.")
@click.option("--mode", type=click.Choice(["min", "max"]))
@click.option(
    "--scope", type=click.Choice(["last", "best"]), default="last", help="Judge by the last or the best report."
)
@format_option
@click.pass_context
def command(
    ctx: click.Context, sweep: str, metric: str | None, mode: str | None, scope: Literal["last", "best"], fmt: Format
) -> None:
    """The best finite run of SWEEP; of several metrics, every run that no other beats. Exit 1 if none is finite."""
    from orchestrator.reports.runs import best
    from orchestrator.workspace import open_for_reading

    print_table(best(open_for_reading(ctx.obj), sweep, metric, mode, scope), fmt)
