"""`orch plan`: what a sweep would run and take. Opens no database and trains no step unless asked to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from orchestrator.cli.output import format_option, print_table
from orchestrator.planning import read_spec
from orchestrator.planning.cost import Estimate
from orchestrator.planning.plan import plan_of
from orchestrator.reports.table import Format
from orchestrator.trial import jsonable


class Shares(click.ParamType[tuple[float, float]]):
    """`10%,40%` or `0.1,0.4`: two different shares."""

    name = "SHARE,SHARE"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[float, float]:
        try:
            low, high = (
                float(part.strip().removesuffix("%")) / (100 if "%" in part else 1) for part in value.split(",")
            )
        except ValueError:
            self.fail("two shares are needed, such as 10%,40%", param, ctx)
        if low == high or not 0 <= low <= 1 or not 0 <= high <= 1:
            self.fail("two different shares between 0 % and 100 % are needed, such as 10%,40%", param, ctx)
        return low, high


@click.command(name="plan")
@click.argument("spec", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="a.b=v", help="Override a value of the file.")
@click.option("--name", help="Another name for the sweep.")
@click.option("--from-history", is_flag=True, help="Foretell minutes from runs of this workload in the database.")
@click.option("--probe", is_flag=True, help="Foretell minutes and memory by training first steps, a minute at most.")
@click.option("--tell-apart", "shares", type=Shares(), help="Trials a cell needs to tell these two shares apart.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object with all figures.")
@format_option
@click.pass_context
def command(
    ctx: click.Context,
    spec: Path,
    overrides: tuple[str, ...],
    name: str | None,
    from_history: bool,
    probe: bool,
    shares: tuple[float, float] | None,
    as_json: bool,
    fmt: Format,
) -> None:
    """Say what SPEC would run: trials, cells, structures, minutes. Starts nothing."""
    if from_history and probe:
        raise click.UsageError("--from-history and --probe are two answers to one question; ask for one")
    if as_json and fmt != "table":
        raise click.UsageError(f"--json prints all figures, --format {fmt} the table of parameters; ask for one")
    asked = read_spec(spec, overrides, name)
    estimate: Estimate | None = None
    remarks: list[str] = []
    if from_history:
        from orchestrator.planning.history import from_history as look_back
        from orchestrator.workload import describe
        from orchestrator.workspace import open_for_reading

        estimate = look_back(open_for_reading(ctx.obj), asked, describe(asked.workload))
    elif probe:
        from orchestrator.planning.probe import from_probe
        from orchestrator.workload import describe

        estimate, remarks = from_probe(asked, describe(asked.workload))
    plan = plan_of(asked, shares, estimate, remarks)
    if as_json:
        click.echo(json.dumps(jsonable(plan.to_json())))
    else:
        print_table(plan.table(), fmt)


def show_plan(spec: Path, overrides: tuple[str, ...], name: str | None, fmt: Format) -> None:
    print_table(plan_of(read_spec(spec, overrides, name)).table(), fmt)
