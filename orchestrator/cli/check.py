"""`orch check`: the preflight alone, on each structure of a sweep or on a workload's defaults. Opens no database."""

from __future__ import annotations

import math
import sys

import click

from orchestrator.cli.output import format_option, print_table
from orchestrator.reports.table import Format


@click.command(name="check")
@click.argument("what", metavar="SPEC_OR_WORKLOAD")
@click.option("--set", "overrides", multiple=True, metavar="a.b=v", help="Override a value, such as params.k=2.")
@format_option
def command(what: str, overrides: tuple[str, ...], fmt: Format) -> int:
    """Check each structure of the sweep file, or of the workload's default config.

    Exit 1 if there is an error, or a structure whose checks failed themselves.
    """
    from orchestrator.planning import read_spec_or_workload
    from orchestrator.preflight import preflight

    def said(text: str) -> None:
        if sys.stderr.isatty():  # somebody waits
            click.echo(text, err=True)

    result = preflight(read_spec_or_workload(what, overrides), said, budget_s=math.inf)
    table = result.table()
    if fmt == "table" and not table.rows:
        click.echo(table.title)
    else:
        print_table(table, fmt)
    return 1 if result.has_error or not result.is_whole else 0
