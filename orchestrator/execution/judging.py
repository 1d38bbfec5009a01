"""Stands between a scheduler and the trials it judges: which attempt begins with what, and how a judge is rebuilt.

Carries nothing out and stores nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from orchestrator.schedulers import Scheduler, make_scheduler
from orchestrator.spec.sweep_spec import SweepSpec
from orchestrator.trial import Action, Decision, Params

GOES_ON = "taken up again: goes on from its own state"
SAVES = (Action.PAUSE, Action.EXPLOIT)  # the attempt saves its state and ends; a copy is made when the next one begins


@dataclass(frozen=True)
class Start:
    """How an attempt begins, as far as a scheduler has a say."""

    changes: Params = field(default_factory=dict)  # what copies have changed of the trial's parameters so far
    decision: Decision | None = None  # made where the trial paused: to copy before anything trains, or to go on

    @property
    def source(self) -> int | None:
        """The trial whose state takes the place of the own one."""
        return self.decision.source if self.decision and self.decision.action is Action.EXPLOIT else None


@dataclass(frozen=True)
class Case:
    """All that a judge of a sweep is made of, besides the ledger. Travels to whoever judges."""

    sweep_id: int
    spec: SweepSpec
    num_trials: int  # that the sweep will have


class Judge(Protocol):
    """Whom a driver and those who train ask."""

    def begin(self, number: int, params: Params, first_step: int) -> Start:
        """A trial's next attempt is about to train from `first_step` on."""

    def decide(self, number: int, step: int, value: float | None) -> Decision | None:
        """What becomes of a trial that reported `value`, or came to `max_steps` without one; None: nothing is due."""

    def over(self, number: int) -> None:
        """The trial will report no more."""


class Unjudged:
    """Of a sweep without a scheduler."""

    def begin(self, number: int, params: Params, first_step: int) -> Start:
        return Start()

    def decide(self, number: int, step: int, value: float | None) -> Decision | None:
        return None

    def over(self, number: int) -> None: ...


class SchedulerJudge:
    """A scheduler, and what its decisions mean for attempts to come."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._last: dict[int, Decision] = {}  # by trial
        self._copies: defaultdict[int, dict[int, Decision]] = defaultdict(dict)  # trial -> step -> EXPLOIT

    def begin(self, number: int, params: Params, first_step: int) -> Start:
        self._scheduler.begin(number, params)
        decision = self._resumed(number, first_step)
        changes: dict[str, Any] = {}
        for step, copy in sorted(self._copies[number].items()):
            if step < first_step:
                changes |= copy.params
        return Start(changes, decision)

    def decide(self, number: int, step: int, value: float | None) -> Decision | None:
        decision = self._scheduler.report(number, step, value)
        if decision is not None:
            self._note(decision)
        return decision

    def over(self, number: int) -> None:
        self._scheduler.end(number)

    def replay(self, decision: Decision) -> None:
        self._scheduler.replay(decision)
        self._note(decision)

    def _resumed(self, number: int, first_step: int) -> Decision | None:
        """What is decided where the trial paused. A copy is said again if a crash came before it was carried out.

        That it goes on from its own state is a decision too: a judge who is rebuilt must not ask a second time.
        """
        last = self._last.get(number)
        if last is None or last.step != first_step - 1:
            return None
        if last.action is Action.PAUSE:
            last = self._scheduler.resume(number) or replace(last, action=Action.CONTINUE, reason=GOES_ON)
            self.replay(last)
            return last
        return last if last.action is Action.EXPLOIT else None

    def _note(self, decision: Decision) -> None:
        self._last[decision.trial] = decision
        if decision.action is Action.EXPLOIT:
            self._copies[decision.trial][decision.step] = decision


def rebuilt(case: Case, database_url: str) -> SchedulerJudge:
    """A judge who knows what the ledger knows: the trials that were begun, what was decided, and who is over."""
    from orchestrator.database.connection import Database  # whoever only trains needs neither
    from orchestrator.ledger.store import Ledger

    engine = Database.from_url(database_url).engine("orch judge")
    try:
        ledger = Ledger(engine)
        rows, decisions = ledger.trials(case.sweep_id), ledger.decisions(case.sweep_id)
    finally:
        engine.dispose()
    scheduler = make_scheduler(case.spec, case.num_trials)
    judge = SchedulerJudge(scheduler)
    for row in rows:
        if row.attempts:
            scheduler.begin(row.number, row.params)
    for decision in decisions:
        judge.replay(decision)
    for row in rows:
        if row.state.is_over:
            scheduler.end(row.number)
    return judge


def copy_in_words(decision: Decision) -> str:
    """For a tag of the run that copied: `trial 3, lr=0.012`."""
    changes: Mapping[str, Any] = decision.params
    return ", ".join([f"trial {decision.source}", *(f"{name}={value}" for name, value in changes.items())])
