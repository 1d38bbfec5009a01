"""`orch sweep`: run a sweep file, show its progress, end with the comparison that answers its question."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.cli.driving import driving_options
from orchestrator.cli.plan import show_plan
from orchestrator.reports.table import Format

if TYPE_CHECKING:  # `orch plan` needs none of it
    from orchestrator.planning import SweepRequest


@click.command(name="sweep")
@click.argument("spec", type=click.Path(path_type=Path))
@click.option("--resume", is_flag=True, help="Create or continue: a finished sweep prints its comparison.")
@click.option("--set", "overrides", multiple=True, metavar="a.b=v", help="Override a value of the file.")
@click.option("--name", help="Another name for the sweep.")
@click.option("--dry-run", is_flag=True, help="Only say what would run (orch plan).")
@click.option("--simulate", is_flag=True, help="Train nothing: run search and scheduler over made-up curves.")
@click.option("--curves", metavar="SWEEP|FILE", help="With --simulate: recorded ones (CSV: trial,step,value).")
@driving_options
@click.pass_context
def command(
    ctx: click.Context,
    spec: Path,
    resume: bool,
    overrides: tuple[str, ...],
    name: str | None,
    dry_run: bool,
    max_concurrent: int | None,
    address: str | None,
    inline: bool,
    simulate: bool,
    curves: str | None,
    detach: bool,
    ready_fd: int | None,
    as_json: bool,
) -> int:
    """Run the sweep file SPEC."""
    fmt: Format = "json" if as_json else "table"
    if dry_run:
        limit = () if max_concurrent is None else (f"resources.max_concurrent={max_concurrent}",)
        show_plan(spec, (*overrides, *limit), name, fmt)
        return 0
    if curves is not None and not simulate:
        raise click.UsageError("--curves goes with --simulate")
    if detach and simulate:
        raise click.UsageError("--detach  a simulation takes a moment and drives no sweep; leave it out")
    from orchestrator.planning import SweepRequest

    request = SweepRequest(
        spec,
        resume=resume,
        overrides=overrides,
        name=name,
        max_concurrent=max_concurrent,
        address=address,
        inline=inline,
        home=ctx.obj,
    )
    if simulate:
        show_simulation(request, curves, fmt)
        return 0
    if detach:
        from orchestrator.cli.detached import leave_running
        from orchestrator.planning import read_spec

        asked = read_spec(spec, request.all_overrides, name)
        return leave_running(request, asked.name, asked.workload, fmt)
    from orchestrator.cli.progress import drive
    from orchestrator.launch import run_sweep

    return drive(lambda observer: run_sweep(request, observer), fmt, ready_fd)


def show_simulation(request: SweepRequest, curves: str | None, fmt: Format) -> None:
    from orchestrator.cli.output import print_table
    from orchestrator.simulating import simulate_sweep

    for number, table in enumerate(simulate_sweep(request, curves)):
        if number and fmt == "table":
            click.echo()
        print_table(table, fmt)
