"""`orch plan`: what a sweep would run. Starts nothing, opens no database."""

from __future__ import annotations

from pathlib import Path

import click

from orchestrator.cli.output import format_option, print_table
from orchestrator.planning import plan_sweep
from orchestrator.reports.table import Format


@click.command(name="plan")
@click.argument("spec", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="a.b=v", help="Override a value of the file.")
@click.option("--name", help="Another name for the sweep.")
@format_option
def command(spec: Path, overrides: tuple[str, ...], name: str | None, fmt: Format) -> None:
    """Say what SPEC would run: trials, axes, cells. Starts nothing."""
    show_plan(spec, overrides, name, fmt)


def show_plan(spec: Path, overrides: tuple[str, ...], name: str | None, fmt: Format) -> None:
    print_table(plan_sweep(spec, overrides, name), fmt)
