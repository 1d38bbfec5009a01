"""What a sweep file says, as frozen values. Parsing lives in `parse.py`; expansion into candidates in `search/`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from orchestrator.spec.domains import Domain, Grid, quick_key

Mode = Literal["min", "max"]
Condition = Mapping[str, tuple[Any, ...]]  # each name with the values it may have; all of them must
Keys = Mapping[str, frozenset[Hashable]]  # a condition with the values' `quick_key`: hundreds are looked up at once
SEED = "seed"  # the field that is a replicate, never a cell
SAME_ERROR = 10  # trials
STEPS = "steps"  # the field that says how long a trial trains, where a workload has one


def keys_of(condition: Condition) -> Keys:
    return {name: frozenset(map(quick_key, options)) for name, options in condition.items()}


@dataclass(frozen=True)
class Metric:
    name: str
    mode: Mode = "min"

    def better(self, left: float, right: float) -> bool:
        """True if `left` beats `right`; both finite."""
        return left < right if self.mode == "min" else left > right


@dataclass(frozen=True)
class Search:
    algorithm: Literal["grid", "random", "optuna"] = "grid"
    samples: int | None = None  # configurations per grid cell, each run with every seed
    seed: int = 0
    sampler: Literal["tpe", "gp", "cmaes", "qmc", "nsga2"] = "tpe"
    enqueue: tuple[Mapping[str, Any], ...] = ()
    """Points to try first, in each cell they fit: values of axes by name; axes that are not named are sampled."""


@dataclass(frozen=True)
class When:
    """An axis that exists only where `condition` holds; elsewhere its field keeps the value `otherwise`, its default.

    The condition names other axes or fixed fields, each with the values it may have: all of them must.
    """

    condition: Condition
    otherwise: Any

    @cached_property
    def keys(self) -> Keys:
        return keys_of(self.condition)


@dataclass(frozen=True)
class Schedule:
    """Which trials may go on. Steps are the workload's own; a scheduler judges the objective that is reported there."""

    algorithm: Literal["none", "asha", "median", "hyperband", "pbt"] = "none"
    max_steps: int | None = None  # where a trial is complete; None: the field `steps` of the workload's Config
    grace_steps: int = 1  # nobody is judged before
    reduction_factor: float = 4.0  # asha, hyperband: one in so many goes on from a rung
    interval_steps: int | None = None  # pbt: steps between two looks at the population
    quantile: float = 0.25  # pbt: the worst share copies the best share
    perturb: tuple[str, ...] = ()  # pbt: the axes that are explored; all of them fusible
    seed: int = 0


@dataclass(frozen=True)
class Budget:
    """What a sweep may cost at most."""

    trials: int | None = None
    time_s: float | None = None  # during which trials of the sweep run, earlier commands included


@dataclass(frozen=True)
class Unstable:
    """Which results count as unstable besides the diverged ones: those whose last `metric` is beyond `bound`."""

    metric: str
    side: Literal["above", "below"]
    bound: float
    relative_to: Mapping[str, Any] = field(default_factory=dict)
    """Grid axes and a value of each: `bound` is then a ratio to the trial that differs only there. Empty: absolute."""


@dataclass(frozen=True)
class Resources:
    cpu: float = 1.0
    gpu: float = 0.0
    max_concurrent: int | None = None  # worker processes; None = as many as fit
    trial_time_s: float | None = None


@dataclass(frozen=True)
class Retries:
    count: int = 0
    any_error: bool = False  # False: worker death, out of memory and timeouts only


@dataclass(frozen=True)
class SweepSpec:
    """A question. `fixed` and `axes` are by dotted field name, in the order of the file."""

    name: str
    workload: str
    metric: Metric
    fixed: Mapping[str, Any]
    axes: Mapping[str, Domain]
    search: Search = Search()
    resources: Resources = Resources()
    retries: Retries = Retries()
    stop_diverged: bool = True
    stop_on: tuple[str, ...] = ()  # findings of these checks end a trial
    same_error: int | None = SAME_ERROR  # so many trials in a row that fail alike end the sweep; None: none do
    thresholds: Mapping[str, float] = field(default_factory=dict)  # limits of checks that are not the workload's own
    unstable: Unstable | None = None  # None: only diverged trials are
    more_metrics: tuple[Metric, ...] = ()  # further objectives, beside `metric`
    when: Mapping[str, When] = field(default_factory=dict)  # by axis, each after the axes that its condition names
    zipped: tuple[tuple[str, ...], ...] = ()  # grid axes of equal length that move together
    exclude: tuple[Condition, ...] = ()  # points that match all of one are left out
    schedule: Schedule = Schedule()
    budget: Budget = Budget()
    log_every: int = 10
    show: tuple[str, ...] = ()  # metrics that comparisons show beside the objective
    tags: Mapping[str, str] = field(default_factory=dict)
    description: str = ""
    source: str = ""  # the file's text
    lines: Mapping[str, str] = field(default_factory=dict)  # path -> `file:line`, for later messages
    fuse: Literal["auto", "off"] | int = "auto"  # an int is the largest group
    preflight: bool = True
    checkpoint_every: int = 100
    keep_checkpoints: bool = False  # the last and the best state of a trial that has its result
    file_name: str = ""
    overrides: tuple[str, ...] = ()  # the texts of `--set`, in order
    notes: tuple[str, ...] = ()  # what a reader of the plan should know: dropped duplicates, an end no step reaches

    def where(self, path: str) -> str:
        """`file:line` of a path such as `params.k`, or of its nearest parent in the file."""
        while path not in self.lines and "." in path:
            path = path.rpartition(".")[0]
        return self.lines.get(path, "")

    @cached_property
    def exclude_keys(self) -> tuple[Keys, ...]:
        return tuple(map(keys_of, self.exclude))

    @property
    def objectives(self) -> tuple[Metric, ...]:
        return (self.metric, *self.more_metrics)

    @property
    def grid_axes(self) -> dict[str, tuple[Any, ...]]:
        """The crossed axes without `seed`. `search.cells_of` crosses them, `when`, `zipped` and `exclude` obeyed."""
        return {name: axis.values for name, axis in self.axes.items() if isinstance(axis, Grid) and name != SEED}

    @property
    def sampled_axes(self) -> dict[str, Domain]:
        return {name: axis for name, axis in self.axes.items() if not isinstance(axis, Grid)}

    @property
    def seeds(self) -> tuple[Any, ...] | None:
        """The replicates of each configuration; None when `seed` is no axis (fixed or left to its default)."""
        axis = self.axes.get(SEED)
        return axis.values if isinstance(axis, Grid) else None
