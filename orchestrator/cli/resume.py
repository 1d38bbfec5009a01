"""`orch resume`: go on with a sweep as it was stored; no file needed."""

from __future__ import annotations

import click

from orchestrator.cli.driving import driving_options
from orchestrator.reports.table import Format


@click.command(name="resume")
@click.argument("sweep")
@click.option("--failed", is_flag=True, help="Run failed trials again, too; each goes on from its last state.")
@click.option("--diverged", is_flag=True, help="Run diverged trials again, too; each begins anew.")
@click.option(
    "--trial",
    "numbers",
    type=int,
    multiple=True,
    metavar="N",
    help="Run trial N again, whatever its state; one with a result begins anew.",
)
@driving_options
@click.pass_context
def command(
    ctx: click.Context,
    sweep: str,
    failed: bool,
    diverged: bool,
    numbers: tuple[int, ...],
    max_concurrent: int | None,
    address: str | None,
    inline: bool,
    detach: bool,
    ready_fd: int | None,
    as_json: bool,
) -> int:
    """Run what is unfinished of SWEEP: trials that wait, were killed or lost. Each goes on from its last checkpoint."""
    from orchestrator.planning import SweepRequest
    from orchestrator.trial import TrialState

    states = [state for state, on in ((TrialState.FAILED, failed), (TrialState.DIVERGED, diverged)) if on]
    request = SweepRequest(
        stored=sweep, resume=True, max_concurrent=max_concurrent, address=address, inline=inline, home=ctx.obj
    )
    fmt: Format = "json" if as_json else "table"
    if detach:
        from orchestrator.cli.detached import leave_running

        return leave_running(request, sweep, None, fmt)
    from orchestrator.cli.progress import drive
    from orchestrator.launch import resume_sweep
    from orchestrator.resuming import Again

    return drive(lambda observer: resume_sweep(request, Again(states, numbers), observer), fmt, ready_fd)
