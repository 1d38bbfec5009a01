"""`orch report`: a sweep's answer as one HTML page, to send to others and to keep."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import click


@click.command(name="report")
@click.argument("sweep")
@click.option(
    "-o", "output", metavar="FILE", help="Where to write it (default: SWEEP.html here; - is standard output)."
)
@click.option("--metric", "metrics", multiple=True, help="Metrics to show (default: the sweep's own and `show:`).")
@click.option("--by", help="Axes that make a cell, such as c_z,k (default: the grid axes without seed).")
@click.pass_context
def command(ctx: click.Context, sweep: str, output: str | None, metrics: tuple[str, ...], by: str | None) -> None:
    """Write one HTML page with the answer of SWEEP: comparison, figures, findings, failures, and the file to run again.

    The page needs no orch, no database and no network. It replaces an older report, and no other file.
    """
    from orchestrator.cli.output import standard_output
    from orchestrator.database.reader import snapshot
    from orchestrator.reports.page import page
    from orchestrator.reports.page.place import place_for
    from orchestrator.reports.source import sweep_facts
    from orchestrator.reports.whole_file import whole_file
    from orchestrator.workspace import open_workspace

    axes = [axis.strip() for axis in by.split(",")] if by else None
    with snapshot(open_workspace(ctx.obj).reader_database) as moment:
        name = sweep_facts(moment.query, sweep).name
        place = None if output == "-" else place_for(Path(output or f"{name}.html"))
        text = page(moment.query, name, axes, metrics, dt.datetime.now(dt.UTC))
    with standard_output() if place is None else whole_file(place) as file:
        file.write(text.encode())
    if place is not None:
        click.echo(place)
