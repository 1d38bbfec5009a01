"""The median rule: a trial whose best so far is worse than the median of the others' averages stops.

Source: Golovin et al., "Google Vizier", 2017, in Ray's reading: the averages run from `grace_steps` to this step, and
every trial that has come this far counts, finished or not. Judged at about twenty steps of a trial, not at each report,
so that what was decided can be stored and replayed; given these reports alone, Ray's class stops the same trials.

Our own, because Ray's `MedianStoppingRule` needs live Tune trials and keeps one that once was infinite out of the
median for ever, and Optuna's `MedianPruner` compares with complete trials only: where most are stopped, the lucky few.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict

from orchestrator.schedulers.milestones import MilestoneScheduler
from orchestrator.schedulers.rungs import quantile, told_apart
from orchestrator.spec.sweep_spec import SweepSpec
from orchestrator.trial import Action, Decision

MIN_OTHERS = 3  # a median of fewer is chance; Ray's default too
MAX_LOOKS = 20  # at one trial


class MedianStopping(MilestoneScheduler):
    """Judges at `grace_steps` and then at even intervals."""

    def __init__(self, spec: SweepSpec, max_steps: int, default_steps: int | None) -> None:
        super().__init__(spec, max_steps, default_steps)
        self._grace_steps = spec.schedule.grace_steps
        self._interval_steps = max(self._grace_steps, math.ceil(max_steps / MAX_LOOKS))
        self._scores: defaultdict[int, list[float]] = defaultdict(list)  # by trial, at its milestones, finite ones
        self._means: defaultdict[int, list[float]] = defaultdict(list)  # by milestone, ascending

    def milestone_at(self, trial: int, step: int) -> int | None:
        if step < self._grace_steps:
            return None
        return step - (step - self._grace_steps) % self._interval_steps

    def _judge(self, trial: int, step: int, milestone: int, value: float) -> Decision:
        action, why = self._verdict(trial, self._means[milestone], value)
        return Decision(trial, step, value, action, f"step {milestone}: {why}")

    def _verdict(self, trial: int, others: list[float], value: float) -> tuple[Action, str]:
        if not math.isfinite(value):
            return Action.STOP, f"{value} is worse than any number"
        if len(others) < MIN_OTHERS:
            return Action.CONTINUE, f"{value:.4g}; too few others came so far to judge by: {len(others)}"
        best, median = max([*self._scores[trial], self._sign * value]), quantile(others, 0.5)
        said, mark = told_apart(self._sign * best, self._sign * median)
        facts = f"median {mark} of the averages of {len(others)}"
        if best < median:
            return Action.STOP, f"its best, {said}, is worse than the {facts}"
        return Action.CONTINUE, f"its best, {said}, is not worse than the {facts}"

    def _take(self, decision: Decision, milestone: int, is_new: bool) -> None:
        if not is_new or decision.value is None or not math.isfinite(decision.value):
            return
        scores = self._scores[decision.trial]
        scores.append(self._sign * decision.value)
        insort(self._means[milestone], math.fsum(scores) / len(scores))
