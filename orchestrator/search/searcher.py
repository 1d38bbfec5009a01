"""What a searcher is, and how a space is expanded: cells, points, replicates, candidates. Pure: no storage, no clock.

A *cell* is one combination of the grid axes without `seed`; a *point* is one value for each sampled axis; a *replicate*
is a seed. A configuration is a cell with a point; it is trained once for every replicate. What `when` switches off
stands at its `otherwise` in all of them, so that cells and points which become equal are one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from orchestrator.spec.domains import Domain, contains, distinct, same_value, value_key, values_of
from orchestrator.spec.relations import conditions_first, excluded, is_active, settled
from orchestrator.spec.sweep_spec import SEED, SweepSpec
from orchestrator.trial import Candidate, Params, Told


class Searcher(Protocol):
    """Decides what to try next from everything known so far."""

    @property
    def notes(self) -> Sequence[str]:
        """What the reader of a plan or of a finished sweep should know; may grow with `ask`."""

    def ask(self, history: Sequence[Told]) -> Sequence[Candidate] | None:
        """The next candidates to add, none of them in `history`.

        `history` holds every trial of the sweep so far, waiting and running ones included, by trial number. An empty
        answer means: nothing before more results are in. None means: nothing more will come.
        """


def cells_of(spec: SweepSpec) -> list[dict[str, Any]]:
    """All combinations of the grid axes in file order, the last axis fastest; one empty cell without axes.

    A cell in which every point is excluded is left out. A grid axis whose condition names a sampled axis has its values
    here; the point decides whether they stand.
    """
    grids = spec.grid_axes
    crossed = [{name: value for part in parts for name, value in part.items()} for parts in _product(spec)]
    cells = [_restricted(settled(spec, cell), grids) for cell in crossed]
    kept = [cell for cell in cells if not _is_left_out(spec, settled(spec, cell))]
    return list(distinct(kept)) if spec.when or spec.zipped else kept


def _product(spec: SweepSpec) -> Iterable[tuple[dict[str, Any], ...]]:
    """The grid axes crossed, those of a zip as one axis that stands where its first one does."""
    grids = spec.grid_axes
    columns: dict[str, list[dict[str, Any]]] = {}
    for name in grids:
        group = next((group for group in spec.zipped if name in group), (name,))
        rows = zip(*(grids[member] for member in group), strict=True)
        columns.setdefault(group[0], [dict(zip(group, row, strict=True)) for row in rows])
    return itertools.product(*columns.values())


def replicates_of(spec: SweepSpec, values: Params | None = None) -> list[dict[str, Any]]:
    """`{"seed": value}` for each seed; one empty replicate when the seed is no axis.

    Given the values of a cell or a configuration, without the seeds that `exclude` leaves out there.
    """
    if spec.seeds is None:
        return [{}]
    replicates = [{SEED: seed} for seed in spec.seeds]
    if values is None or not any(SEED in one for one in spec.exclude):
        return replicates
    return [one for one in replicates if not excluded(spec, settled(spec, {**values, **one}))]


def make_candidate(
    spec: SweepSpec, cell: Params, point: Params, replicate: Params, sample: int | None = None
) -> Candidate:
    values = settled(spec, {**cell, **point, **replicate})
    params = {**spec.fixed, **{name: values[name] for name in spec.axes}}
    return Candidate(params, {name: values[name] for name in cell}, sample)


def trial_key(spec: SweepSpec, params: Params) -> str:
    """Identifies a trial among those of its sweep, whichever way its parameters were stored."""
    return value_key({name: params.get(name) for name in spec.axes})


def settled_point(spec: SweepSpec, cell: Params, point: Params) -> dict[str, Any] | None:
    """The point with its inactive axes at `otherwise`; None if it is excluded in this cell."""
    values = settled(spec, {**cell, **point})
    return None if _is_left_out(spec, values) else _restricted(values, point)


def _is_left_out(spec: SweepSpec, values: Params) -> bool:
    """True if `exclude` matches these settled values, or leaves no seed there."""
    return bool(spec.exclude) and (excluded(spec, values) or not replicates_of(spec, values))


def points_in(spec: SweepSpec, cell: Params, limit: int) -> list[dict[str, Any]] | None:
    """Every point of a cell, the last axis fastest; None where there are more than `limit`, or a continuous axis."""
    axes = spec.sampled_axes
    partial = [dict(cell)]
    for name in axes_in_order(spec):
        partial, before = [], partial
        for values in before:
            options = _options(spec, name, values, limit)
            if options is None or len(partial) + len(options) > limit:
                return None
            partial += [{**values, name: value} for value in options]
    points = [_restricted(values, axes) for values in partial if not _is_left_out(spec, values)]
    return list(distinct(points)) if spec.when else points


def axes_in_order(spec: SweepSpec) -> list[str]:
    """All axes but the seed, each after those that its condition names."""
    return conditions_first([name for name in spec.axes if name != SEED], spec.when)


def _options(spec: SweepSpec, name: str, values: Params, limit: int) -> tuple[Any, ...] | None:
    if not is_active(spec, name, values):
        return (spec.when[name].otherwise,)
    return (values[name],) if name in values else values_of(spec.axes[name], limit)


def deciding_axes(spec: SweepSpec) -> set[str]:
    """The axes on which a cell's points depend: those that `when`, `exclude` or `enqueue` name."""
    conditions = [when.condition for when in spec.when.values()]
    return {name for names in (*conditions, *spec.exclude, *spec.search.enqueue) for name in names}


def late_axes(spec: SweepSpec) -> set[str]:
    """The axes that exist or not by what is sampled; of the others a cell knows."""
    late: set[str] = set()
    for axis, when in spec.when.items():
        if set(when.condition) & (late | set(spec.sampled_axes)):
            late.add(axis)
    return late


def shares_configurations(spec: SweepSpec) -> bool:
    """True if cells can have a configuration in common: a grid axis exists or not by a sampled one."""
    return bool(late_axes(spec) & set(spec.grid_axes))


def enqueued_in(spec: SweepSpec, cell: Params) -> list[dict[str, Any]]:
    """The values of sampled axes to try first in a cell: of the entries of `enqueue` that fit it, in their order."""
    sampled = spec.sampled_axes
    fitting = [one for one in spec.search.enqueue if fits(spec, one, cell)]
    return [{name: value for name, value in one.items() if name in sampled} for one in fitting]


def fits(spec: SweepSpec, entry: Params, cell: Params) -> bool:
    """True if an entry of `enqueue` has the cell's values and, of sampled axes, some that these have."""
    sampled = spec.sampled_axes
    return all(same_value(value, cell[name]) for name, value in entry.items() if name in cell) and all(
        contains(sampled[name], value) for name, value in entry.items() if name in sampled
    )


def samples_of(spec: SweepSpec) -> int:
    """Configurations that each cell may have: `samples`, or as many as `budget.trials` has room for; 0 if for none."""
    samples = spec.search.samples or 1
    if spec.budget.trials is None or not spec.sampled_axes:
        return samples
    return min(samples, spec.budget.trials // trials_per_sample(spec))


def trials_per_sample(spec: SweepSpec) -> int:
    """Trials that one more configuration in every cell makes, all its seeds counted."""
    return max(1, sum(len(replicates_of(spec, cell)) for cell in cells_of(spec)))


def few_points_note(axes: Mapping[str, Domain], samples: int, counts: Sequence[int]) -> str:
    """That cells have fewer points than `samples`, given how many each has; empty if all have enough."""
    fewest, most = min(counts, default=samples), max(counts, default=samples)
    if fewest >= samples:
        return ""
    found = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    return f"{', '.join(axes)}: only {found} distinct points; samples: {samples} gives {found} per cell"


def _restricted(values: Params, names: Iterable[str]) -> dict[str, Any]:
    return {name: values[name] for name in names}
