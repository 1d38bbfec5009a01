"""Both ends of a command's work on a sweep: frees and adopts what it finds there, and writes how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from orchestrator.backends import Backend
from orchestrator.ending import INTERRUPTED, exit_code
from orchestrator.extension import with_kept_points
from orchestrator.resuming import where_it_goes_on
from orchestrator.search import make_searcher
from orchestrator.spec import SweepSpec
from orchestrator.trial import TrialState
from orchestrator.workload import Description

if TYPE_CHECKING:  # heavy or needing a database: imported where a sweep really starts
    from orchestrator.database.borrow import Engine
    from orchestrator.execution.mirroring import Mirroring
    from orchestrator.execution.sweep_run import Observer, SweepRun
    from orchestrator.ledger.lease import Lease
    from orchestrator.ledger.rows import SweepRow, TrialRow
    from orchestrator.ledger.store import Ledger
    from orchestrator.tracking.recorder import Remainder
    from orchestrator.tracking.runs import Runs

VIEW_REFRESH_S = 10.0


def open_run(
    ledger: Ledger,
    runs: Runs,
    spec: SweepSpec,
    workload: Description,
    sweep: SweepRow,
    observer: Observer,
    backend: Backend,
    refresh_views: Callable[[bool], None],
    lease: Lease,
    mirroring: Mirroring,
    again: Sequence[int],
    revive_database: Callable[[], None],
    broken: Callable[[str], None],
) -> SweepRun:
    """Frees what a dead command left running, and the trials of the numbers `again`; adopts runs without a trial, and
    expands the search as far as it goes.
    """
    from orchestrator.execution.opening import Opening
    from orchestrator.execution.sweep_run import SweepRun
    from orchestrator.ledger.models import SweepState
    from orchestrator.tracking.facts import system_facts

    released = _released(ledger, runs, sweep, again)
    _adopt_runs(ledger, runs, sweep)
    run = SweepRun(
        opening=Opening(sweep, spec, workload, ledger, runs, backend.device, run_tags=system_facts(workload.package)),
        searcher=make_searcher(with_kept_points(spec, [row.params for row in ledger.trials(sweep.id)])),
        observer=observer,
        refresh_views=refresh_views,
        lease=lease,
        mirroring=mirroring,
        revive_database=revive_database,
        broken=broken,
    )
    if line := where_it_goes_on(run, released):
        observer.said(line)
    run.expand()
    ledger.set_sweep_state(sweep.id, SweepState.RUNNING)
    run.refresh_views(True)
    return run


def _released(ledger: Ledger, runs: Runs, sweep: SweepRow, again: Sequence[int]) -> list[TrialRow]:
    """The trials that wait again. One that has a result and is to run again does not go on from its end."""
    from orchestrator.execution.checkpoints import forget

    for row in ledger.trials(sweep.id):
        if row.number in again and row.state.is_result and row.run_id and sweep.experiment_id:
            forget(runs.artifact_uri(sweep.experiment_id, row.run_id))
    return ledger.release_unfinished(sweep.id, numbers=again)


def _adopt_runs(ledger: Ledger, runs: Runs, sweep: SweepRow) -> None:
    """Gives trials the runs that a crash has left without them."""
    orphans = {f"{sweep.id}/{row.number}": row for row in ledger.trials(sweep.id) if row.run_id is None}
    if orphans and sweep.experiment_id:
        for key, run_id in runs.adopt(orphans).items():
            runs.log_params(run_id, orphans[key].config)  # the crash may have come before them
            ledger.set_run(orphans[key].id, run_id)


def view_refresher(engine: Engine, sweep: str) -> Callable[[bool], None]:
    """Rebuilds the sweep's view when new metric keys have appeared, at most every ten seconds, or when told to."""
    from orchestrator.database.borrow import borrowed
    from orchestrator.database.view_catalog import rebuild_sweep_view, sweep_view_is_stale

    looked_at = time.monotonic()

    def refresh(now: bool = False) -> None:
        nonlocal looked_at
        if not now and time.monotonic() - looked_at < VIEW_REFRESH_S:
            return
        looked_at = time.monotonic()
        with borrowed(engine) as connection:
            if now or sweep_view_is_stale(connection, sweep):
                rebuild_sweep_view(connection, sweep, lock_wait_s=20.0 if now else 2.0)  # the lease waits for us

    return refresh


def settle(ledger: Ledger, sweep: SweepRow, run: SweepRun, remainders: Sequence[Remainder]) -> int:
    """Writes how the sweep ended and returns the command's exit code."""
    from orchestrator.ledger.models import SweepState

    run.refresh_views(True)
    if run.cancelled and run.trials.is_left:
        ledger.set_sweep_state(sweep.id, SweepState.CANCELLED)
        return 1
    if run.interrupted and not run.cancelled:  # one that came too late to stop anything leaves nothing to go on with
        ledger.set_sweep_state(sweep.id, SweepState.INTERRUPTED if run.trials.is_left else SweepState.FINISHED)
        return INTERRUPTED
    if run.abort_reason:
        ledger.set_sweep_state(sweep.id, SweepState.FAILED)
        return 1
    is_cut_short = run.time.is_up and run.trials.counts()[TrialState.WAITING] > 0
    ledger.set_sweep_state(sweep.id, SweepState.INTERRUPTED if is_cut_short else SweepState.FINISHED)
    is_whole = not run.without_record and all(one.is_empty for one in remainders)
    code_of = code_of_what_is_over if is_cut_short else exit_code
    return code_of(run.trials.counts()) if is_whole else 1


def code_of_what_is_over(counts: Mapping[TrialState, int]) -> int:
    """The exit code where time was up, or would have been: trials that still wait are no failure."""
    return exit_code({state: count for state, count in counts.items() if not state.is_unfinished})
