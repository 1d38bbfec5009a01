"""`orch compare`: per cell the mean and spread over seeds, the diverged share with its interval, the cost."""

from __future__ import annotations

import click

from orchestrator.cli.output import format_option, print_table
from orchestrator.reports.table import Format


@click.command(name="compare")
@click.argument("sweeps", nargs=-1, required=True)
@click.option("--by", help="Axes that make a cell, such as c_z,k (default: the grid axes without seed).")
@click.option("--metric", "metrics", multiple=True, help="Metrics to compare (default: the sweep's own and `show:`).")
@format_option
@click.pass_context
def command(ctx: click.Context, sweeps: tuple[str, ...], by: str | None, metrics: tuple[str, ...], fmt: Format) -> None:
    """Compare the cells of one or more SWEEPS."""
    from orchestrator.reports.compare import compare, effects
    from orchestrator.workspace import open_for_reading

    query = open_for_reading(ctx.obj)
    axes = [axis.strip() for axis in by.split(",")] if by else None
    print_table(compare(query, sweeps, axes, metrics), fmt)
    if fmt == "table" and len(sweeps) == 1 and axes is None:
        changes = effects(query, sweeps[0], metrics)
        if changes.rows:
            click.echo()
            print_table(changes)
