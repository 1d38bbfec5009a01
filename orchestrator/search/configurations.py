"""The trials of a sweep as configurations, cell by cell, and what Optuna is told of each. Suggests nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isfinite
from statistics import fmean
from typing import Any

from optuna.trial import TrialState as StudyState

from orchestrator.search.searcher import (
    cells_of,
    make_candidate,
    replicates_of,
    shares_configurations,
    trial_key,
)
from orchestrator.spec.domains import value_key
from orchestrator.spec.sweep_spec import SEED, SweepSpec
from orchestrator.trial import Params, Told, TrialState


@dataclass(frozen=True)
class Result:
    """A configuration as Optuna sees it: `values` only if COMPLETE; of a PRUNED one its value and the step of it."""

    state: StudyState
    values: tuple[float, ...] | None = None
    step: int | None = None
    value_at_step: float | None = None


@dataclass
class Configuration:
    """One point of a cell with what is known of its replicates."""

    point: Params
    params: Params  # of its first trial
    num_replicates: int
    told: list[Told] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return len(self.told) >= self.num_replicates

    def result(self, num_metrics: int = 1) -> Result:
        """COMPLETE with the mean of each metric over the seeds as soon as one seed went to the end.

        FAIL if any seed has no finite value: it diverged, or failed. PRUNED if a scheduler or a finding stopped all of
        them: one metric's mean is then an intermediate value at the step that the longest one reached, and with several
        metrics there is none (Optuna has no such thing). RUNNING until all are over.
        """
        if not self.is_whole or not all(told.state.is_over for told in self.told):
            return Result(StudyState.RUNNING)
        values = [_finite_values(told, num_metrics) for told in self.told]
        known = [row for row in values if row is not None]
        if len(known) < len(values):
            return Result(StudyState.FAIL)
        means = tuple(fmean(column) for column in zip(*known, strict=True))
        if any(told.state is TrialState.FINISHED for told in self.told):
            return Result(StudyState.COMPLETE, means)
        if num_metrics > 1:
            return Result(StudyState.PRUNED)
        return Result(StudyState.PRUNED, step=max(told.last_step or 0 for told in self.told), value_at_step=means[0])


Known = dict[str, Configuration]  # by value_key of the point, in order of appearance


def _finite_values(told: Told, num_metrics: int) -> tuple[float, ...] | None:
    """All metrics of a trial that trained to where it should; None if one is missing or not finite."""
    if not told.state.is_sound:
        return None
    values = (told.objective, *told.more_objectives)[:num_metrics]
    finite = tuple(value for value in values if value is not None and isfinite(value))
    return finite if len(finite) == num_metrics else None


@dataclass(frozen=True)
class Place:
    """Where a trial belongs."""

    params: Params
    trial: str  # trial_key
    cells: tuple[str, ...]  # keys; several share it where a grid axis exists or not by a sampled one
    point: Params
    point_key: str


class Grouping:
    """Sorts trials into the cells of a spec."""

    def __init__(self, spec: SweepSpec) -> None:
        self._spec = spec
        self.cells = {value_key(cell): cell for cell in cells_of(spec)}
        self._shares = shares_configurations(spec)
        self._places: dict[int, Place] = {}

    def known(self, trials: Iterable[Told]) -> dict[str, Known]:
        """The configurations of each cell. A trial whose cell has left the file is left out."""
        known: dict[str, Known] = {key: {} for key in self.cells}
        for told in trials:
            place = self.place(told.candidate.params)
            for cell in place.cells:
                if place.point_key not in known[cell]:
                    known[cell][place.point_key] = self._configuration(place)
                known[cell][place.point_key].told.append(told)
        return known

    def place(self, params: Params) -> Place:
        """Kept by identity: a driver hands the same mappings over at every ask."""
        place = self._places.get(id(params))
        if place is None or place.params is not params:
            place = self._places[id(params)] = self._place(params)
        return place

    def _place(self, params: Params) -> Place:
        point = {name: params.get(name) for name in self._spec.sampled_axes}
        key = trial_key(self._spec, params)
        if self._shares:
            replicate = {SEED: params[SEED]} if self._spec.seeds is not None else {}
            candidates = {cell: make_candidate(self._spec, self.cells[cell], point, replicate) for cell in self.cells}
            cells = [cell for cell, one in candidates.items() if trial_key(self._spec, one.params) == key]
        else:
            cells = [value_key({name: params.get(name) for name in self._spec.grid_axes})]
        return Place(params, key, tuple(cell for cell in cells if cell in self.cells), point, value_key(point))

    def _configuration(self, place: Place) -> Configuration:
        values: dict[str, Any] = {name: value for name, value in place.params.items() if name != SEED}
        return Configuration(place.point, place.params, len(replicates_of(self._spec, values)))
