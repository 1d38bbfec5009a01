"""Population-based training: at each milestone the worst copy the best and go on with changed parameters.

A population is what shares a cell: weights that were trained under another value of a grid axis would make comparing
cells a lie. Sampled axes travel with the state, those in `perturb` changed; the seed and how long it trains stay the
trial's own.

A trial is judged by what the members did at the same milestone, when it comes and nobody waits for its worker; or else
it pauses, so that few workers carry many members on evenly, and is judged when it is taken up again, among more.
A value that is not finite ranks worst: such a member copies as soon as there is a finite one, and pauses until then.
What it copies and how it changes depends on (schedule.seed, trial, milestone) and who came by then, on nothing else.

Source: Jaderberg et al., "Population Based Training of Neural Networks", 2017; sizes of the quantiles, factors and the
chance of drawing anew are those of Ray's, which cannot be driven without live Tune trials.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from typing import Any

from orchestrator.schedulers.milestones import MilestoneScheduler
from orchestrator.spec.domains import (
    Choice,
    Int,
    Uniform,
    contains,
    lattice_count,
    nearest_value,
    same_value,
    sample,
    value_key,
)
from orchestrator.spec.sweep_spec import STEPS, SweepSpec
from orchestrator.trial import Action, Decision, Params

FACTORS = (0.8, 1.2)
RESAMPLE_PROBABILITY = 0.25
Rank = tuple[float, int]  # the score with its sign turned, so that the best is first, and the trial
MAX_MILESTONES_BEHIND = 1  # its writer, for whom a state is still there


class PopulationBasedTraining(MilestoneScheduler):
    """Milestones are the multiples of `interval_steps` below `max_steps`."""

    def __init__(self, spec: SweepSpec, max_steps: int, default_steps: int | None, num_trials: int) -> None:
        super().__init__(spec, max_steps, default_steps)
        self._spec, self._num_trials = spec, num_trials
        assert spec.schedule.interval_steps, "a spec without it is refused when it is read"
        self._interval_steps = spec.schedule.interval_steps
        self._params: dict[int, Params] = {}  # by trial, as they are now
        self._params_at: defaultdict[int, dict[int, Params]] = defaultdict(dict)  # milestone -> trial -> trained with
        self._cells: dict[int, str] = {}
        self._ranked: defaultdict[tuple[int, str], list[Rank]] = defaultdict(list)  # (milestone, cell) -> best first
        self._copied: defaultdict[int, set[int]] = defaultdict(set)  # milestone -> trials whose state is not their own
        self._paused: dict[int, Decision] = {}
        self._num_paused: Counter[int] = Counter()  # by milestone
        self._over: set[int] = set()
        self._known: set[int] = set()  # trials that were begun, or are over without

    def begin(self, trial: int, params: Params) -> None:
        super().begin(trial, params)
        self._known.add(trial)
        self._params.setdefault(trial, params)  # of a later attempt we know better: what it took from others
        self._cells[trial] = value_key({axis: params.get(axis) for axis in self._spec.grid_axes})

    def resume(self, trial: int) -> Decision | None:
        paused = self._paused.get(trial)
        self._unpause(trial)
        if paused is None or paused.value is None:
            return None
        decision = self._exploit(trial, paused.step, self._passed[trial], paused.value)
        if decision is not None:
            self.replay(decision)
        return decision

    def end(self, trial: int) -> None:
        self._over.add(trial)
        self._known.add(trial)
        self._unpause(trial)

    def milestone_at(self, trial: int, step: int) -> int | None:
        return step // self._interval_steps * self._interval_steps or None

    def _judge(self, trial: int, step: int, milestone: int, value: float) -> Decision:
        num_behind = self._num_waiting_behind(milestone)
        if not num_behind and (copy := self._exploit(trial, step, milestone, value)):
            return copy
        place, size = self._place(trial, milestone, value)
        action, why = Action.CONTINUE, f" is {place + 1} of {size}"
        if num_behind:
            action, why = Action.PAUSE, f"; makes room for {_trials(num_behind)} behind it"
        elif not math.isfinite(value) and (num_to_come := self._num_to_come(trial, milestone)):
            action, why = Action.PAUSE, f"; waits to copy another, {_trials(num_to_come)} of its population to come"
        return Decision(trial, step, value, action, f"milestone {milestone}: {value:.4g}{why}")

    def _take(self, decision: Decision, milestone: int, is_new: bool) -> None:
        trial = decision.trial
        self._unpause(trial)
        if is_new and decision.value is not None:
            insort(self._ranked[milestone, self._cells[trial]], self._rank(trial, decision.value))
            self._params_at[milestone][trial] = self._params[trial]
        if decision.action is Action.PAUSE:
            self._paused[trial] = decision
            self._num_paused[milestone] += 1
        if decision.action is Action.EXPLOIT:
            self._params[trial] = {**self._params[trial], **decision.params}
            self._copied[milestone].add(trial)

    def _unpause(self, trial: int) -> None:
        if (paused := self._paused.pop(trial, None)) is not None:
            self._num_paused[self.milestone_at(trial, paused.step) or 0] -= 1

    @property
    def _num_unknown(self) -> int:
        """Trials of the sweep that have not begun."""
        return max(self._num_trials - len(self._known), 0)

    def _num_waiting_behind(self, milestone: int) -> int:
        """Trials that could use the worker and have not come so far; those that run have one."""
        return self._num_unknown + sum(count for place, count in self._num_paused.items() if place < milestone)

    def _num_to_come(self, trial: int, milestone: int) -> int:
        """Members from which the trial might copy when they come to this milestone."""
        members = [one for one, cell in self._cells.items() if cell == self._cells[trial] and one not in self._over]
        return self._num_unknown + sum(self._passed.get(one, 0) < milestone for one in members if one != trial)

    def _exploit(self, trial: int, step: int, milestone: int, value: float) -> Decision | None:
        """The copy that the trial has to make, None if it is good enough or there is nobody to copy from."""
        place, size = self._place(trial, milestone, value)
        num_worst = min(math.ceil(size * self._spec.schedule.quantile), size // 2)
        if place < size - num_worst and math.isfinite(value):
            return None
        best = self._ranked[milestone, self._cells[trial]][:num_worst]
        sources = [rank for rank in best if self._has_state(rank, milestone, step)]
        if not sources:
            return None
        rng = random.Random(f"{self._spec.schedule.seed}/{trial}/{milestone}")
        loss, source = rng.choice(sources)
        params = self._explored(trial, self._params_at[milestone][source], rng)
        reason = (
            f"milestone {milestone}: {value:.4g} is {place + 1} of {size}; goes on from trial {source} "
            f"({-self._sign * loss:.4g})"
        )
        return Decision(trial, step, value, Action.EXPLOIT, reason, source, params)

    def _rank(self, trial: int, value: float) -> Rank:
        return (-self._sign * value if math.isfinite(value) else math.inf), trial

    def _place(self, trial: int, milestone: int, value: float) -> tuple[int, int]:
        """How many of the population did better by this milestone, and how many are there, the trial counted."""
        ranked, rank = self._ranked[milestone, self._cells[trial]], self._rank(trial, value)
        place = bisect_left(ranked, rank)
        is_counted = place < len(ranked) and ranked[place] == rank
        return place, len(ranked) + (not is_counted)

    def _has_state(self, rank: Rank, milestone: int, step: int) -> bool:
        """True if the trial has a finite state of its own of this very step that is still kept."""
        loss, trial = rank
        if (trial, step) not in self._decided:  # its report at the milestone lacked the objective: it came later
            return False
        is_kept = self._passed[trial] - milestone <= MAX_MILESTONES_BEHIND * self._interval_steps
        return is_kept and trial not in self._copied[milestone] and math.isfinite(loss)

    def _explored(self, trial: int, theirs: Params, rng: random.Random) -> dict[str, Any]:
        """What changes: the source's sampled values, those of `perturb` moved."""
        new = {name: theirs[name] for name in self._spec.sampled_axes}
        new |= {name: moved(self._spec.axes[name], theirs[name], rng) for name in self._spec.schedule.perturb}
        new.pop(STEPS, None)  # else it could end where it stands
        ours = self._params[trial]
        return {name: value for name, value in new.items() if not same_value(ours[name], value)}


def _trials(count: int) -> str:
    return "1 trial" if count == 1 else f"{count} trials"


def moved(domain: Any, value: Any, rng: random.Random) -> Any:
    """Another value of the domain, near `value` or drawn anew. What it does not hold, as of an inactive axis, stays."""
    if not contains(domain, value):
        return value
    if rng.random() < RESAMPLE_PROBABILITY:
        return sample(domain, rng)
    if isinstance(domain, Choice):
        return _neighbour(domain, value, rng)
    return _scaled(domain, value, rng.choice(FACTORS))


def _neighbour(domain: Choice, value: Any, rng: random.Random) -> Any:
    """A move inside the range that holds the value, or to the option before or behind."""
    index = next(index for index, option in enumerate(domain.options) if contains(option, value))
    if isinstance(domain.options[index], Uniform | Int):
        return _scaled(domain.options[index], value, rng.choice(FACTORS))
    index = min(max(index + rng.choice((-1, 1)), 0), len(domain.options) - 1)
    return sample(domain.options[index], rng)


def _scaled(domain: Uniform | Int, value: float, factor: float) -> float | int:
    """The domain's value nearest to `factor * value`; on a lattice at least one place further, if there is one."""
    target = nearest_value(domain, value * factor)
    if target == value and lattice_count(domain) is not None:
        step = domain.step or 1
        target = nearest_value(domain, value + math.copysign(step, value * (factor - 1)))
    return target
