"""Stops a sweep from wherever its database is reached: asks its command to end and waits for that. Kills nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from orchestrator.ledger.lease import Holder
from orchestrator.ledger.models import SweepState, Wish
from orchestrator.ledger.rows import SweepRow
from orchestrator.ledger.store import Ledger
from orchestrator.reports.source import stored_sweep
from orchestrator.reports.status import state_counts
from orchestrator.tracking.standing import mark_runs
from orchestrator.trial import TrialState
from orchestrator.workspace import open_workspace

WAIT_S = 90.0  # longer than trials that do not answer are waited for
POLL_S = 0.3


def cancel_sweep(home: Path | None, name: str, now: bool, say: Callable[[str], None]) -> int:
    """Cancels a sweep and says what became of its trials; returns the exit code. Raises NotFound with the nearest name.

    The second time, or `now`, running trials are killed instead of saving their state first.
    """
    workspace = open_workspace(home)  # what a dead command left running is marked by now
    ledger = Ledger(workspace.database.engine("orch cancel"))
    sweep = stored_sweep(ledger, workspace.query, name)
    holder = ledger.holder(sweep.id)
    is_driven = not holder.is_free
    if not is_driven and sweep.state.is_settled:
        say(f"sweep {name} is {sweep.state} already: there is nothing to cancel")
        return 0
    if is_driven and not _has_ended(ledger, holder, now, say):
        say(f"{holder.name} has not ended within {WAIT_S:.0f} s; kill its trials at once: orch cancel {name} --now")
        return 1
    _cancel_what_nobody_drives(ledger, sweep)
    counts = ", ".join(f"{count} {state}" for state, count in state_counts(workspace.query, name).items())
    state = ledger.sweep(sweep.id).state
    say(f"sweep {name} is {state}: {counts or 'no trials yet'}")
    if state is not SweepState.FINISHED:  # else it had come to its end before it heard
        say(f"  orch resume {name:<30}  go on with what is left")
    return 0


def _has_ended(ledger: Ledger, holder: Holder, now: bool, say: Callable[[str], None]) -> bool:
    """Asks the holder to end, and waits for it; False if it has not ended in time."""
    wish = ledger.ask_to_cancel(holder, now)
    if wish is Wish.CANCEL_NOW:
        say(f"asked {holder.name} to end at once")
    elif wish is Wish.CANCEL:
        say(f"asked {holder.name} to stop: its trials save their state (a second `orch cancel` ends them at once)")
    deadline = time.monotonic() + WAIT_S
    while (found := ledger.holder(holder.sweep_id)).fence == holder.fence and not found.is_free:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _cancel_what_nobody_drives(ledger: Ledger, sweep: SweepRow) -> None:
    """Also where its command died while it was asked. Raises AlreadyExists if another command was faster."""
    if ledger.sweep(sweep.id).state.is_settled:
        return
    reason = holder.why_lost if (holder := ledger.holder(sweep.id)).heartbeat_at else ""
    with ledger.hold(sweep.id, mark_runs) as lease:
        lease.strike(TrialState.LOST, SweepState.CANCELLED, reason)
        ledger.under(lease).set_sweep_state(sweep.id, SweepState.CANCELLED)
