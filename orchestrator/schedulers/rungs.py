"""Asynchronous successive halving, and Hyperband as several brackets of it. Waits for nobody and pauses nobody.

From each rung one trial in `reduction_factor` goes on, judged against those that came before it: the first always does.
Source: Li et al., "A System for Massively Parallel Hyperparameter Tuning", 2020, in its stopping form, which is Ray's:
given the same finite results in the same order, the same trials survive. The brackets: Li et al., "Hyperband", 2018.

Our own: Ray's class lets a NaN go on, fails on a missing value and costs the import of Ray. Optuna's pruners can be
driven (0.1 to 0.2 ms a report at 1,000 trials) but judge otherwise: of the first trials each must be the best yet, one
report falls through several rungs at once, infinity counts among the values, and brackets are dealt by a checksum, so
that the first dozen may all be in one.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict
from collections.abc import Sequence

from orchestrator.schedulers.milestones import MilestoneScheduler
from orchestrator.spec.sweep_spec import Schedule, SweepSpec
from orchestrator.trial import Action, Decision


class SuccessiveHalving(MilestoneScheduler):
    """Judges at the rungs of a trial's bracket; `asha` has one bracket, `hyperband` several."""

    def __init__(self, spec: SweepSpec, max_steps: int, default_steps: int | None) -> None:
        super().__init__(spec, max_steps, default_steps)
        self._reduction_factor = spec.schedule.reduction_factor
        self._brackets = brackets_of(spec.schedule, max_steps)
        self._sizes = bracket_sizes(len(self._brackets), self._reduction_factor)
        self._num_dealt = [0] * len(self._brackets)
        self._dealt: list[int] = []  # by trial number: its bracket
        self._scores: defaultdict[tuple[int, int], list[float]] = defaultdict(list)  # (bracket, rung) -> ascending

    def bracket_of(self, trial: int) -> int:
        """Dealt by trial number alone, so that any number of first trials is spread as the whole will be."""
        while len(self._dealt) <= trial:
            emptiest = min(range(len(self._sizes)), key=lambda one: (self._num_dealt[one] + 0.5) / self._sizes[one])
            self._num_dealt[emptiest] += 1
            self._dealt.append(emptiest)
        return self._dealt[trial]

    def milestone_at(self, trial: int, step: int) -> int | None:
        return max((rung for rung in self._brackets[self.bracket_of(trial)] if rung <= step), default=None)

    def _judge(self, trial: int, step: int, milestone: int, value: float) -> Decision:
        action, why = self._verdict(self._scores[self.bracket_of(trial), milestone], value)
        return Decision(trial, step, value, action, f"rung {milestone}: {why}")

    def _verdict(self, scores: Sequence[float], value: float) -> tuple[Action, str]:
        if not math.isfinite(value):
            return Action.STOP, f"{value} is worse than any number"
        if not scores:
            return Action.CONTINUE, f"{value:.4g} is the first here"
        cutoff = quantile(scores, 1 - 1 / self._reduction_factor)
        share = f"the best {100 / self._reduction_factor:.3g} % of the {len(scores)} before it"
        said, mark = told_apart(value, self._sign * cutoff)
        if self._sign * value < cutoff:
            return Action.STOP, f"{said} is worse than {mark}, the cutoff for {share}"
        return Action.CONTINUE, f"{said} is not worse than {mark}, the cutoff for {share}"

    def _take(self, decision: Decision, milestone: int, is_new: bool) -> None:
        if is_new and decision.value is not None and math.isfinite(decision.value):
            insort(self._scores[self.bracket_of(decision.trial), milestone], self._sign * decision.value)


def brackets_of(schedule: Schedule, max_steps: int) -> list[list[int]]:
    """The rungs of each bracket, as steps below `max_steps`. Each bracket begins one rung later than the one before.

    As many brackets as powers of the reduction factor fit between `grace_steps` and `max_steps`, both included.
    """
    steps, rung = [], float(schedule.grace_steps)
    while rung <= max_steps:
        steps.append(math.ceil(rung))
        rung *= schedule.reduction_factor
    num_brackets = max(len(steps), 1) if schedule.algorithm == "hyperband" else 1
    return [[step for step in steps[first:] if step < max_steps] for first in range(num_brackets)]


def bracket_sizes(num_brackets: int, reduction_factor: float) -> list[int]:
    """How many trials each bracket has in a whole band, so that all cost about the same number of steps.

    Source: Hyperband, algorithm 1: ceil((s_max + 1) / (s + 1) * eta^s), s falling from s_max to 0.
    """
    return [math.ceil(num_brackets * reduction_factor**s / (s + 1)) for s in reversed(range(num_brackets))]


def quantile(ascending: Sequence[float], share: float) -> float:
    """Interpolated linearly between the two neighbours, as NumPy's default. Needs at least one value."""
    position = round((len(ascending) - 1) * share, 9)  # else rounding puts the cutoff just above an equal score
    below = math.floor(position)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (ascending[above] - ascending[below]) * (position - below)


def told_apart(value: float, other: float) -> tuple[str, str]:
    """Two finite numbers in four digits, or in as many as tell them apart: a reason shows why."""
    pairs = ((f"{value:.{digits}g}", f"{other:.{digits}g}") for digits in range(4, 18))
    return next(pair for pair in pairs if value == other or pair[0] != pair[1])
