"""What trials of a workload took, from the runs in the database; for a plan. Reads views only, as the reading role.

Seconds of a trial = start + steps x seconds a step, fitted among runs of the same structure and sizes by the median
of all slopes (Theil 1950, Sen 1968): a third of the runs may be off, on a busy machine say, without moving it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median, quantiles
from typing import Any

from orchestrator.errors import NoResult
from orchestrator.planning.cost import Config, Estimate, Kind, estimate, is_cost, kinds_of
from orchestrator.reports.source import Query
from orchestrator.reports.statistics import finite
from orchestrator.reports.table import counted
from orchestrator.spec import SweepSpec
from orchestrator.spec.domains import is_number, value_key
from orchestrator.spec.sweep_spec import STEPS
from orchestrator.workload import Description

MAX_RUNS = 2000  # the newest
MAX_FITTED = 60  # of one structure: all pairs are looked at
MEMORY = "memory/peak_bytes"  # what runs on a GPU report

RUNS = """
    select r.sweep, r.config, r.seconds, r.last_step, r.device, m.max as bytes
    from orch.runs r
    left join orch.final_metrics m on m.run_id = r.run_id and m.key = %s
    where r.workload = %s and r.state in ('finished', 'stopped', 'diverged') and r.attempts = 1 and r.seconds > 0
    order by r.ended_at desc
    limit %s
"""


@dataclass(frozen=True)
class PastRun:
    """A run of one attempt: `seconds` is what its steps took."""

    sweep: str
    config: Config
    seconds: float
    steps: int | None  # None where the workload counts none
    memory_bytes: float | None


@dataclass(frozen=True)
class Fit:
    """Seconds of a trial of one structure."""

    start: float
    per_step: float

    def seconds(self, steps: int | None) -> float:
        return self.start + self.per_step * (steps or 0)


def from_history(query: Query, spec: SweepSpec, workload: Description) -> Estimate:
    """The sweep's cost after what earlier runs took. Raises NoResult where there are none of this workload."""
    runs = past_runs(query, spec)
    if not runs:
        where = "a GPU" if spec.resources.gpu else "the CPU"
        raise NoResult(f"--from-history  no run of {spec.workload} on {where} is recorded; measure it: --probe")
    cost_fields = [name for name, field in workload.fields().items() if is_cost(field)]
    groups = _by_structure(runs, cost_fields)
    kinds = kinds_of(spec, workload)
    nearest = {id(kind): _nearest(kind.config, groups, cost_fields) for kind in kinds}
    fits = {key: fit_of(members) for key, members in groups.items()}
    used = set(nearest.values())
    foreign = [kind for kind in kinds if _key(kind.config, cost_fields) not in groups]
    return estimate(
        spec,
        kinds,
        lambda kind: fits[nearest[id(kind)]].seconds(kind.steps),
        _spread([(run, fits[key]) for key in used for run in groups[key]]),
        max(finite(run.memory_bytes for key in used for run in groups[key]), default=None),
        _basis([run for key in used for run in groups[key]], len(kinds), foreign, groups, cost_fields),
    )


def past_runs(query: Query, spec: SweepSpec) -> list[PastRun]:
    """The newest runs of the spec's workload on the device that it would run on."""
    columns, rows = query(RUNS, (MEMORY, spec.workload, MAX_RUNS))
    wanted = "cuda" if spec.resources.gpu else "cpu"
    records = [dict(zip(columns, row, strict=True)) for row in rows]
    return [
        PastRun(one["sweep"], one["config"], one["seconds"], _steps(one), one["bytes"])
        for one in records
        if (one["device"] or "cpu") == wanted
    ]


def fit_of(runs: Sequence[PastRun]) -> Fit:
    """Robust line through (steps, seconds); through the origin where all runs have the same number of steps."""
    points = [(run.steps or 0, run.seconds) for run in runs[:MAX_FITTED]]
    slopes = [(t - s) / (y - x) for (x, s), (y, t) in combinations(points, 2) if x != y]
    if not slopes or (per_step := median(slopes)) <= 0:
        per_step = median(seconds / steps if steps else 0.0 for steps, seconds in points)
        return Fit(0.0 if per_step else median(seconds for _, seconds in points), per_step)
    start = median(seconds - per_step * steps for steps, seconds in points)
    return Fit(max(0.0, start), per_step)


def _steps(record: Mapping[str, Any]) -> int | None:
    """Those that it trained, which may be fewer than its config says: it diverged, or was stopped."""
    return record["last_step"] if STEPS in record["config"] else None


def _by_structure(runs: Sequence[PastRun], cost_fields: Sequence[str]) -> dict[str, list[PastRun]]:
    groups: dict[str, list[PastRun]] = {}
    for run in runs:
        groups.setdefault(_key(run.config, cost_fields), []).append(run)
    return groups


def _key(config: Config, cost_fields: Sequence[str]) -> str:
    return value_key([config.get(name) for name in cost_fields])


def _nearest(config: Config, groups: Mapping[str, Sequence[PastRun]], cost_fields: Sequence[str]) -> str:
    """The structure that differs least: fewest unlike words, then fewest doublings between the numbers."""

    def distance(key: str) -> float:
        other = groups[key][0].config
        return sum(_unlike(config.get(name), other.get(name)) for name in cost_fields)

    own = _key(config, cost_fields)
    return own if own in groups else min(groups, key=distance)


def _unlike(left: Any, right: Any) -> float:
    """0 for the same; doublings between two positive numbers; 10 for anything else."""
    if value_key(left) == value_key(right):
        return 0.0
    numbers = [one for one in (left, right) if is_number(one) and one > 0]
    return abs(math.log2(numbers[0] / numbers[1])) if len(numbers) == 2 else 10.0


def _spread(pairs: Sequence[tuple[PastRun, Fit]]) -> tuple[float, float]:
    """The factors between which 8 of 10 past runs lay of what their fit says."""
    ratios = [run.seconds / said for run, fit in pairs if (said := fit.seconds(run.steps)) > 0]
    if len(ratios) < 2:
        return 1.0, 1.0
    tenths = quantiles(ratios, n=10, method="inclusive")
    return min(1.0, tenths[0]), max(1.0, tenths[-1])


def _basis(
    runs: Sequence[PastRun],
    num_kinds: int,
    foreign: Sequence[Kind],
    groups: Mapping[str, Sequence[PastRun]],
    cost_fields: Sequence[str],
) -> str:
    sweeps = sorted({run.sweep for run in runs})
    named = ", ".join(sweeps[:3]) + (f" and {len(sweeps) - 3} more" if len(sweeps) > 3 else "")
    words = f"from {counted(len(runs), 'run')} of {named}"
    if not foreign:
        return words
    config = foreign[0].config
    other = groups[_nearest(config, groups, cost_fields)][0].config
    differing = [name for name in cost_fields if value_key(config.get(name)) != value_key(other.get(name))]
    example = ", ".join(f"{name}={config.get(name)} by {other.get(name)}" for name in differing[:3])
    return f"{words}; {len(foreign)} of {num_kinds} structures never ran, guessed by the nearest ({example})"
