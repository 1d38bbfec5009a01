"""Seconds of a whole sweep from the seconds of its trials, whoever knows these. Measures nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.preflight import foreseen
from orchestrator.reports.table import short
from orchestrator.search import plan_count
from orchestrator.spec import SweepSpec
from orchestrator.spec.domains import value_key
from orchestrator.spec.sweep_spec import SEED, STEPS
from orchestrator.trial import Params
from orchestrator.workload import Description, SweepField, flatten

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Kind:
    """Trials that cost the same: they differ in the seed and in fields that may differ inside one model only."""

    params: Params  # of the first of them
    config: Config  # resolved, by dotted name
    num_trials: float  # of an Optuna search an even share: nobody knows yet what it will draw
    varied: Params  # what sets it apart from the sweep's others

    @property
    def steps(self) -> int | None:
        value = self.config.get(STEPS)
        return value if isinstance(value, int) else None

    def __str__(self) -> str:
        return ", ".join(f"{axis}={short(value)}" for axis, value in self.varied.items()) or "the only kind"


@dataclass(frozen=True)
class Estimate:
    """What a sweep would take, before any scheduler stops a trial. `low` and `high` hold it 8 times in 10."""

    minutes: float
    low: float
    high: float
    num_workers: int
    memory_bytes: float | None  # of a worker's process, or of its GPU; None where nothing has recorded it
    basis: str  # how it is known, in words

    def notes(self) -> list[str]:
        between = "" if self.low == self.high else f" ({_minutes(self.low)} to {_minutes(self.high)})"
        head = f"about {_minutes(self.minutes)} min{between} on {self.num_workers} workers: {self.basis}"
        memory = f"memory of a worker: about {self.memory_bytes / 2**20:.0f} MiB" if self.memory_bytes else ""
        return [head, memory] if memory else [head]

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def kinds_of(spec: SweepSpec, workload: Description) -> list[Kind]:
    """The sweep's trials by what they cost, in the order of the first of each."""
    fields = workload.fields()
    axes = [axis for axis in spec.axes if is_cost(fields[axis]) or axis == STEPS]
    found: dict[str, list[Params]] = {}
    num_foreseen = 0
    for candidate in foreseen(spec):
        found.setdefault(value_key([candidate.params.get(axis) for axis in axes]), []).append(candidate.params)
        num_foreseen += 1
    scale = plan_count(spec) / max(num_foreseen, 1)
    firsts = [some[0] for some in found.values()]
    differing = [axis for axis in axes if len({value_key(params.get(axis)) for params in firsts}) > 1]
    return [
        Kind(
            first,
            flatten(workload.resolve(first)),
            len(some) * scale,
            {axis: first.get(axis) for axis in differing},
        )
        for first, some in zip(firsts, found.values(), strict=True)
    ]


def is_cost(field: SweepField) -> bool:
    """True for what decides how much a step computes: structure and sizes, neither scalars nor the seed or duration."""
    return not field.fusible and field.name not in (SEED, STEPS)


def num_workers(spec: SweepSpec, num_trials: int) -> int:
    """As many as the file allows; without a limit as many as this machine's cores hold."""
    fitting = max(1, int((os.cpu_count() or 1) / spec.resources.cpu))
    return max(1, min(spec.resources.max_concurrent or fitting, num_trials))


def estimate(
    spec: SweepSpec,
    kinds: Sequence[Kind],
    seconds_of: Callable[[Kind], float],
    spread: tuple[float, float],
    memory_bytes: float | None,
    basis: str,
) -> Estimate:
    """The sweep's time where a trial takes `seconds_of` its kind, give or take the factors of `spread`."""
    costs = [seconds_of(kind) for kind in kinds]
    total = sum(kind.num_trials * seconds for kind, seconds in zip(kinds, costs, strict=True))
    workers = num_workers(spec, plan_count(spec))
    minutes = max(total / workers, max(costs, default=0.0)) / 60
    low, high = (minutes * factor for factor in spread)
    return Estimate(minutes, low, high, workers, memory_bytes, basis)


def _minutes(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"
