"""Which searcher a spec asks for and how many trials it will make, before anything starts."""

from __future__ import annotations

import math

from orchestrator.search.listed import ListedSearcher
from orchestrator.search.random_search import draw_points
from orchestrator.search.searcher import Searcher, few_points_note, replicates_of, space_size
from orchestrator.spec.sweep_spec import SweepSpec


def make_searcher(spec: SweepSpec) -> Searcher:
    """A fresh searcher; give it the history of an interrupted sweep and it goes on where that one ended."""
    if spec.search.algorithm != "optuna":
        return ListedSearcher(spec)
    from orchestrator.search.optuna_search import OptunaSearcher  # Optuna takes half a second to import

    return OptunaSearcher(spec)


def points_per_cell(spec: SweepSpec) -> int:
    """Configurations of each cell: `samples`, or fewer where the sampled axes have fewer points."""
    if spec.search.algorithm != "optuna":
        return len(draw_points(spec))
    samples = spec.search.samples or 1
    return min(samples, space_size(spec.sampled_axes) or samples)


def plan_count(spec: SweepSpec) -> int:
    """How many trials the sweep will have when it is finished."""
    num_cells = math.prod(len(values) for values in spec.grid_axes.values())
    return num_cells * points_per_cell(spec) * len(replicates_of(spec))


def plan_notes(spec: SweepSpec) -> tuple[str, ...]:
    """The spec's own notes, and that a small space has fewer points than samples were asked for."""
    samples, found = spec.search.samples, points_per_cell(spec)
    if samples is None or found >= samples:
        return spec.notes
    return (*spec.notes, few_points_note(spec.sampled_axes, samples, found))
