"""Made-up curves: a power law towards a floor that depends on the parameters, with noise. Claims nothing about a model.

Each axis has a hidden best place, drawn by `seed`; the farther off, the higher the floor. A higher learning rate falls
faster, so that curves cross and the early best is not always the last; from 85 % of its range on trials diverge, the
sooner the higher. A sweep without an axis called `lr` falls at drawn speeds, and 3 % of its trials diverge.
The seed of a trial changes its noise only. Of a metric to be maximised, 1 / (1 + loss) is reported.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.spec.domains import Choice, Grid, Int, Uniform, contains, value_key
from orchestrator.spec.sweep_spec import SEED, STEPS, Mode, SweepSpec
from orchestrator.trial import Candidate, Params

LEARNING_RATES = ("lr", "learning_rate")
DIVERGES_FROM = 0.85  # of the range of the learning rate
DIVERGED_SHARE = 0.03  # where there is no learning rate
LOWEST = 0.1  # the floor at the best place
DEPTH = 1.5  # what a distance of 1 from it adds
START = 2.0  # the first loss, above the floor
NOISE = 0.01  # standard deviation
HALVING_SHARE = 0.02  # of the steps: a quarter of the starting loss is gone by three times this


@dataclass(frozen=True)
class SyntheticCurve:
    """Goes on at `since` with `progress` made and `lag` above its floor: zeros, unless it copied a state."""

    steps: Sequence[int]
    seconds_per_step: float
    mode: Mode
    noise_seed: str
    floor: float
    speed: float  # progress per step, as a share of the whole
    diverges_at: float  # step
    since: int = 0
    progress: float = 0.0
    lag: float = 0.0

    def value(self, step: int) -> float | None:
        if step >= self.diverges_at:
            return math.nan
        loss = self.floor + self.lag_at(step) + START * _remaining(self.progress_at(step))
        loss += random.Random(f"{self.noise_seed}/{step}").gauss(0, NOISE)
        return loss if self.mode == "min" else 1 / (1 + max(loss, 0.0))

    def progress_at(self, step: int) -> float:
        return self.progress + self.speed * (step - self.since)

    def lag_at(self, step: int) -> float:
        """What is left of the floor that the copied state stood on: it fades as the trial moves on."""
        return self.lag * math.exp(-self.speed * (step - self.since) / (5 * HALVING_SHARE))


def _remaining(progress: float) -> float:
    return 1 / math.sqrt(1 + progress / HALVING_SHARE)


class Landscape:
    """Curves by the distance of a trial's parameters from a hidden best place."""

    def __init__(self, spec: SweepSpec, num_steps: int, seed: int = 0) -> None:
        self._spec, self._seed, self._num_steps = spec, seed, num_steps
        self._best = {name: self._rng(name).uniform(0.2, 0.8) for name in spec.axes}
        self._steps: dict[int, list[int]] = {}

    def of(self, number: int, candidate: Candidate) -> SyntheticCurve:
        return self._curve(number, candidate.params)

    def copied(self, number: int, source: Any, step: int, params: Params) -> SyntheticCurve:
        fresh = self._curve(number, params)
        lag = source.floor + source.lag_at(step) - fresh.floor
        changed = {"since": step, "progress": source.progress_at(step), "lag": lag}
        changed["diverges_at"] = step + fresh.diverges_at
        return SyntheticCurve(**{**vars(fresh), **changed})

    def _curve(self, number: int, params: Params) -> SyntheticCurve:
        axes = {name: params[name] for name in self._spec.axes if name != SEED}
        rng = self._rng(value_key(axes))
        places = {name: self._place(name, value) for name, value in axes.items()}
        rate = next((places[name] for name in LEARNING_RATES if name in places), None)
        num_steps = int(params.get(STEPS, self._num_steps))
        speed, draw = rng.uniform(0.3, 1.7), rng.random()
        diverges_at = draw / DIVERGED_SHARE if draw < DIVERGED_SHARE else math.inf
        if rate is not None:
            speed = 0.3 + 1.4 * rate
            diverges_at = 1.05 - (rate - DIVERGES_FROM) / (1 - DIVERGES_FROM) if rate > DIVERGES_FROM else math.inf
        return SyntheticCurve(
            steps=self._steps_of(num_steps),
            seconds_per_step=self._rng(f"speed/{number}").uniform(0.8, 1.25),
            mode=self._spec.metric.mode,
            noise_seed=f"{self._seed}/{number}",
            floor=LOWEST + DEPTH * self._distance(places),
            speed=speed / num_steps,
            diverges_at=diverges_at * num_steps,
        )

    def _steps_of(self, num_steps: int) -> list[int]:
        """The multiples of `log_every` and the last step."""
        if num_steps not in self._steps:
            every = self._spec.log_every
            self._steps[num_steps] = [*range(every, num_steps, every), num_steps]
        return self._steps[num_steps]

    def _distance(self, places: Mapping[str, float]) -> float:
        """Root mean square over the axes, 0 to 0.8."""
        squares = [(place - self._best[name]) ** 2 for name, place in places.items()]
        return math.sqrt(math.fsum(squares) / len(squares)) if squares else 0.0

    def _place(self, name: str, value: Any) -> float:
        """Where in its axis a value lies, 0 to 1."""
        return _place_in(self._spec.axes[name], value, self._rng(f"{name}={value_key(value)}").random())

    def _rng(self, what: str) -> random.Random:
        return random.Random(f"{self._seed}/{what}")


def _place_in(domain: Any, value: Any, otherwise: float) -> float:
    """By value in a range, by rank among listed numbers; `otherwise` for what has no order, or lies outside."""
    if isinstance(domain, Choice):
        inner = next((option for option in domain.options if contains(option, value)), None)
        if isinstance(inner, Uniform | Int):
            return _place_in(inner, value, otherwise)
        domain = Grid(tuple(option for option in domain.options if not isinstance(option, Choice | Uniform | Int)))
    if not contains(domain, value):
        return otherwise
    if isinstance(domain, Uniform | Int):
        low, high, at = domain.low, domain.high, value
        if domain.log:
            low, high, at = math.log(low), math.log(high), math.log(value)
        return float((at - low) / (high - low)) if high > low else 0.5
    if isinstance(domain, Grid) and all(type(option) in (int, float) for option in domain.values):
        return sorted(domain.values).index(value) / max(len(domain.values) - 1, 1)
    return otherwise
