"""What all schedulers share: each milestone of a trial is judged once, at the first report that reaches it.

A report that lacks the objective judges nothing; the next one that has it does. A report that reaches several
milestones at once is judged at the highest: the same value judged again would only be stopped more often. A trial is
not judged at its own last step: it is finished, and there is nothing left to save.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from orchestrator.spec.sweep_spec import STEPS, SweepSpec
from orchestrator.trial import Action, Decision, Params


class Unscheduled:
    """Lets every trial go on to its end."""

    def begin(self, trial: int, params: Params) -> None: ...

    def report(self, trial: int, step: int, value: float | None) -> Decision | None:
        return None

    def replay(self, decision: Decision) -> None: ...

    def resume(self, trial: int) -> Decision | None:
        return None

    def end(self, trial: int) -> None: ...


class MilestoneScheduler(ABC):
    """A `Scheduler` whose every decision is taken in by `replay`, those it has just made too: so a replay is the same.

    Inside, a *score* is an objective with its sign turned so that higher is better.
    """

    def __init__(self, spec: SweepSpec, max_steps: int, default_steps: int | None) -> None:
        self._sign = 1.0 if spec.metric.mode == "max" else -1.0
        self._max_steps, self._default_steps = max_steps, default_steps
        self._decided: dict[tuple[int, int], Decision] = {}  # by trial and step
        self._passed: dict[int, int] = {}  # trial -> the last milestone it was judged at
        self._ends_at: dict[int, int] = {}  # trials that end by themselves at `max_steps` or before, and where

    def begin(self, trial: int, params: Params) -> None:
        steps = params.get(STEPS, self._default_steps)
        if steps is not None and steps <= self._max_steps:
            self._ends_at[trial] = steps

    def report(self, trial: int, step: int, value: float | None) -> Decision | None:
        if known := self._decided.get((trial, step)):
            return known
        if self._is_last(trial, step):
            return self._complete(trial, step, value)
        milestone = self.milestone_at(trial, step)
        if value is None or milestone is None or milestone <= self._passed.get(trial, 0):
            return None
        decision = self._judge(trial, step, milestone, value)
        self.replay(decision)
        return decision

    def replay(self, decision: Decision) -> None:
        self._decided[decision.trial, decision.step] = decision
        milestone = self.milestone_at(decision.trial, decision.step)
        if milestone is None or decision.value is None or self._is_last(decision.trial, decision.step):
            return
        is_new = milestone > self._passed.get(decision.trial, 0)
        self._passed[decision.trial] = milestone
        self._take(decision, milestone, is_new)

    def resume(self, trial: int) -> Decision | None:
        return None

    def end(self, trial: int) -> None:
        return None

    @abstractmethod
    def milestone_at(self, trial: int, step: int) -> int | None:
        """The highest milestone of this trial that `step` reaches."""

    @abstractmethod
    def _judge(self, trial: int, step: int, milestone: int, value: float) -> Decision:
        """What to do at a milestone. Changes nothing: `_take` does."""

    @abstractmethod
    def _take(self, decision: Decision, milestone: int, is_new: bool) -> None:
        """Remembers a decision; `is_new` if it is the trial's first at this milestone."""

    def _is_last(self, trial: int, step: int) -> bool:
        return step >= self._ends_at.get(trial, self._max_steps)

    def _complete(self, trial: int, step: int, value: float | None) -> Decision | None:
        """Stops a trial that would train on behind `max_steps`; one that ends there says so itself."""
        if trial in self._ends_at:
            return None
        decision = Decision(trial, step, value, Action.STOP, f"complete: max_steps {self._max_steps} is reached")
        self.replay(decision)
        return decision
