"""What a sweep would run, before anything does: counts, cells, structures, what they could tell, what they would take.

Opens no database and starts nothing, unless it is handed an estimate that came from there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from orchestrator.planning.cost import Estimate
from orchestrator.planning.seeds import MAX_TRIALS, share_told_from_none, trials_needed
from orchestrator.preflight import Structure, preflight_notes, structures_of
from orchestrator.reports.source import unstable_in_words
from orchestrator.reports.table import Table, counted, short
from orchestrator.search import is_upper_bound, listed_candidates, plan_notes
from orchestrator.search.plan import points_by_cell
from orchestrator.search.searcher import cells_of, replicates_of
from orchestrator.settings import Settings
from orchestrator.spec import SweepSpec, to_json
from orchestrator.spec.domains import Domain, value_key
from orchestrator.spec.resolved import domain_json
from orchestrator.spec.sweep_spec import SEED
from orchestrator.spec.yaml_text import flow
from orchestrator.tracking.shelf import keeps_states
from orchestrator.trial import Candidate
from orchestrator.workload import Description, describe

TEST = "95 % confidence, 80 % power, Fisher's exact test"


@dataclass(frozen=True)
class Plan:
    """What `spec` comes to. `shares`: two that somebody wants told apart."""

    spec: SweepSpec
    workload: Description
    shares: tuple[float, float] | None = None
    estimate: Estimate | None = None
    remarks: Sequence[str] = ()  # what a probe showed besides

    @cached_property
    def listed(self) -> list[Candidate] | None:
        """Every trial; None of a search that learns from results."""
        return listed_candidates(self.spec)

    @cached_property
    def trials_by_cell(self) -> Sequence[int]:
        """Of each cell that gets one."""
        if self.listed is not None:
            return list(Counter(value_key(one.cell) for one in self.listed).values())
        return [sum(numbers) for numbers in self._seeds_in_cells]

    @cached_property
    def seeds_by_configuration(self) -> Sequence[int]:
        """With how many seeds each configuration is trained: `exclude` may name some."""
        if self.listed is not None:
            return list(Counter(value_key({**one.params, SEED: None}) for one in self.listed).values())
        return [number for numbers in self._seeds_in_cells for number in numbers]

    @cached_property
    def _seeds_in_cells(self) -> list[list[int]]:
        """Of each configuration that a learning search may make, by cell."""
        cells = zip(cells_of(self.spec), points_by_cell(self.spec), strict=True)
        return [[len(replicates_of(self.spec, cell))] * num_points for cell, num_points in cells]

    @property
    def num_trials(self) -> int:
        """At most so many where `is_upper_bound`."""
        return sum(self.trials_by_cell)

    @property
    def num_cells(self) -> int:
        return len(self.trials_by_cell)

    @property
    def num_configurations(self) -> int:
        return len(self.seeds_by_configuration)

    @property
    def trials_per_cell(self) -> int:
        """The least, where cells differ."""
        return min(self.trials_by_cell, default=0)

    @cached_property
    def is_upper_bound(self) -> bool:
        return is_upper_bound(self.spec)

    @cached_property
    def structures(self) -> list[Structure]:
        return structures_of(self.spec, self.workload, candidates=self.listed)

    def table(self) -> Table:
        """One row a parameter; the rest is in the notes."""
        rows = [[axis, *_described(domain)] for axis, domain in self.spec.axes.items()]
        rows += [[field, "fixed", _written(value)] for field, value in self.spec.fixed.items()]
        title = self.spec.description or self.spec.name
        return Table(["parameter", "kind", "values"], rows, title=title, notes=self.notes())

    def notes(self) -> list[str]:
        spec = self.spec
        notes = [
            ", ".join(
                [
                    f"{self._most}{counted(self.num_trials, 'trial')} of {spec.workload}",
                    _search_in_words(spec),
                    *(f"{one.mode} {one.name}" for one in spec.objectives),
                    *([f"scheduler {spec.schedule.algorithm}"] if spec.schedule.algorithm != "none" else []),
                ]
            ),
            self._arithmetic(),
            f"each {spec.resources.cpu:g} CPU, {spec.resources.gpu:g} GPU; "
            f"{spec.resources.max_concurrent or 'as many as fit'} at once",
            f"{self._most}{counted(self.num_trials, 'group')} of one trial each: no trials are fused in this version",
            *plan_notes(spec),
        ]
        notes += [unstable_in_words(to_json(spec)["unstable"])] if spec.unstable else []
        notes += preflight_notes(spec, self.workload, self.structures)
        notes += _no_checkpoints_note()
        notes += [*self._told_apart(), *(self.estimate.notes() if self.estimate else ()), *self.remarks]
        return notes

    def to_json(self) -> dict[str, Any]:
        """For scripts: the counts by name, the parameters as the file has them, and all that the table says."""
        spec = self.spec
        document = to_json(spec)
        return {
            "sweep": spec.name,
            "workload": spec.workload,
            "trials": self.num_trials,
            "at_most": self.is_upper_bound,
            "configurations": self.num_configurations,
            "seeds": len(replicates_of(spec)),
            "cells": self.num_cells,
            "cell_axes": list(spec.grid_axes),
            "trials_per_cell": self.trials_per_cell,
            "max_trials_per_cell": max(self.trials_by_cell, default=0),
            "structures": [dict(one.varied) for one in self.structures],
            "groups": self.num_trials,
            "params": document["params"],
            "search": document["search"],
            "scheduler": document["scheduler"],
            "tells_from_none": share_told_from_none(self.trials_per_cell),
            "tell_apart": self._wanted(),
            "estimate": self.estimate.to_json() if self.estimate else None,
            "notes": self.notes(),
        }

    @property
    def _most(self) -> str:
        return "at most " if self.is_upper_bound else ""

    def _arithmetic(self) -> str:
        axes = " x ".join(self.spec.grid_axes)
        cells = f"{counted(self.num_cells, 'cell')} ({axes})" if axes else "one cell (no grid axis)"
        return (
            f"{self._most}{counted(self.num_configurations, 'configuration')}"
            f" x {_span(self.seeds_by_configuration, 'seed')}; "
            f"{cells} of {self._most}{_span(self.trials_by_cell, 'trial')}; "
            f"{counted(len(self.structures), 'structure')}{_axes_of(self.structures)}"
        )

    def _told_apart(self) -> list[str]:
        """What the trials of a cell can tell of a share; only where the sweep or the person asks for shares."""
        notes = []
        if self.spec.unstable or self.shares:
            where = "a cell" if len(set(self.trials_by_cell)) == 1 else "of the smallest cell"
            notes.append(self._most + _what_they_tell(self.trials_per_cell, where))
        if self.shares:
            low, high = (f"{100 * share:g} %" for share in self.shares)
            needed = trials_needed(*self.shares)
            number = f"more than {MAX_TRIALS}" if needed is None else str(needed)
            has = f"it has {self._most}{_span(self.trials_by_cell)}"
            notes.append(f"to tell {low} from {high}: {number} trials a cell ({TEST}); {has}")
        return notes

    def _wanted(self) -> Mapping[str, Any] | None:
        if self.shares is None:
            return None
        return {"shares": list(self.shares), "trials_needed": trials_needed(*self.shares)}


def plan_of(
    spec: SweepSpec,
    shares: tuple[float, float] | None = None,
    estimate: Estimate | None = None,
    remarks: Sequence[str] = (),
) -> Plan:
    return Plan(spec, describe(spec.workload), shares, estimate, remarks)


def _search_in_words(spec: SweepSpec) -> str:
    sampler = f" ({spec.search.sampler})" if spec.search.algorithm == "optuna" else ""
    return f"{spec.search.algorithm} search{sampler}"


def _span(numbers: Sequence[int], noun: str = "") -> str:
    """`3 trials`, or `2 to 6 trials` where they differ."""
    least, most = min(numbers, default=0), max(numbers, default=0)
    until = counted(most, noun) if noun else str(most)
    return until if least == most else f"{least} to {until}"


def _what_they_tell(n: int, where: str) -> str:
    least, trials = share_told_from_none(n), f"{counted(n, 'trial')} {where} tell{'s' * (n == 1)}"
    if least is None:
        return f"{trials} no shares apart, not even none from all: 4 are the fewest ({TEST})"
    return f"{trials} a setting that never fails from one that fails in {100 * least:.0f} % ({TEST})"


def _no_checkpoints_note() -> list[str]:
    root = Settings().artifact_root
    if root and not keeps_states(root):
        return [f"no checkpoints in {root}: an interrupted trial starts again at step 0"]
    return []


def _described(domain: Domain) -> tuple[str, str]:
    """`grid`, `0, 0.1` or `loguniform`, `0.001, 0.01`, as in the file."""
    (kind, values), *step = domain_json(domain).items()
    return kind, ", ".join([*map(_written, values), *(f"step {width}" for _, width in step)])


def _written(value: Any) -> str:
    """As in the file, texts in quotes where they would be read as something else; floats in four digits."""
    return short(value) if isinstance(value, float) else flow(value)


def _axes_of(structures: Sequence[Structure]) -> str:
    return f" ({', '.join(structures[0].varied)})" if structures and structures[0].varied else ""
