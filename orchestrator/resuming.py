"""What `orch resume` goes on with: the spec a sweep was stored with, and the trials that run again. Starts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestrator.errors import NotFound
from orchestrator.spec import SweepSpec, parse_sweep
from orchestrator.spec.resolved import from_json
from orchestrator.trial import TrialState
from orchestrator.workload import describe

if TYPE_CHECKING:  # need the database's driver
    from orchestrator.execution.sweep_run import SweepRun
    from orchestrator.ledger.rows import SweepRow, TrialRow

MAX_NAMED = 5


@dataclass(frozen=True)
class Again:
    """Which trials run again although they are over: those in some states, and those that are named."""

    states: Sequence[TrialState] = ()
    numbers: Sequence[int] = ()

    def chosen(self, sweep: str, trials: Sequence[TrialRow]) -> list[int]:
        """Their numbers. Raises NotFound for a number that the sweep does not have."""
        known = {trial.number for trial in trials}
        if unknown := sorted(set(self.numbers) - known):
            there = f"has trials {min(known)} to {max(known)}" if known else "has no trials yet"
            raise NotFound(f"--trial {unknown[0]}  sweep {sweep!r} {there}")
        return [trial.number for trial in trials if trial.state in self.states or trial.number in self.numbers]

    def unmatched(self, sweep: str, trials: Sequence[TrialRow]) -> list[str]:
        """A line for each state that no trial is in."""
        found = {trial.state for trial in trials}
        return [f"--{state}  no trial of {sweep} {_ended_so(state)}" for state in self.states if state not in found]


def _ended_so(state: TrialState) -> str:
    return "has failed" if state is TrialState.FAILED else "has diverged"


def stored_spec(sweep: SweepRow, overrides: Sequence[str] = ()) -> SweepSpec:
    """The spec of a sweep, from the ledger alone. It still tells the file it came from, and the file's text.

    Raises SpecError where its workload does not understand it any more, NotFound where that cannot be imported.
    """
    if "resolved" not in sweep.spec:  # stored before specs were stored so
        return from_json(sweep.spec, describe)
    source = sweep.spec["source"]
    spec = parse_sweep(sweep.spec["resolved"], f"{sweep.name} (as stored)", describe, overrides, sweep.name)
    return replace(spec, file_name=source["file"], source=source["text"], overrides=tuple(source["set"]))


def where_it_goes_on(run: SweepRun, released: Sequence[TrialRow]) -> str:
    """`2 trials go on behind the start: 3 from step 31, 7 from step 41`; empty where all begin at the start.

    Where the states cannot be looked at now, that: each trial that begins asks again.
    """
    from orchestrator.execution.checkpoints import Unusable

    try:
        steps = {trial.number: run.opening.first_step_of(trial) for trial in released if trial.run_id}
    except Unusable as error:
        return str(error)
    later = {number: step for number, step in sorted(steps.items()) if step > 0}
    if not later:
        return ""
    named = ", ".join(f"{number} from step {step}" for number, step in list(later.items())[:MAX_NAMED])
    more = f" and {len(later) - MAX_NAMED} more" if len(later) > MAX_NAMED else ""
    trials = "1 trial goes" if len(later) == 1 else f"{len(later)} trials go"
    return f"{trials} on where a checkpoint was saved: {named}{more}"
