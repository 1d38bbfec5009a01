"""Lists what a space can hold: grid values and the values that stand for a range, under `when`, `zip` and `exclude`.

For checks before anything starts; what is really trained, and in which order, `search/` decides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from orchestrator.spec.domains import Grid, contains, distinct, ends, quick_key
from orchestrator.spec.relations import excluded, is_active, settled
from orchestrator.spec.sweep_spec import SweepSpec

Point = Mapping[str, Any]
Factor = Sequence[Point]  # what one axis may be, or several that move together
MAX_SURROUNDINGS = 1000  # of a pair, that are searched for one where both of it exist


def factors_of(spec: SweepSpec, axes: Collection[str]) -> list[Factor]:
    """The axes as factors of a product, those of a `zip` as one. A range stands for its ends and the values named."""
    zipped = {axis: group for group in spec.zipped for axis in group}
    groups = dict.fromkeys(zipped.get(axis, (axis,)) for axis in spec.axes if axis in axes)
    return [_rows(spec, group) for group in groups]


def num_combinations(factors: Iterable[Factor]) -> int:
    return math.prod(len(rows) for rows in factors)


def settled_points(spec: SweepSpec, factors: Sequence[Factor]) -> Iterator[Point]:
    """The product with inactive axes at their default; a point may come more than once."""
    return (settled(spec, _joined(row)) for row in itertools.product(*factors))


def points_of(spec: SweepSpec, factors: Sequence[Factor]) -> Iterator[Point]:
    """The product, settled and without what is excluded. Points that become equal come once."""
    return _legal(spec, settled_points(spec, factors))


def pairs_of(spec: SweepSpec, factors: Sequence[Factor]) -> Iterator[Point]:
    """As `points_of`, but only every pair of values of two factors, those with the fewest values first.

    The other axes are at the first values with which the pair's own exist, as far as they can, and are not excluded.
    """
    pairs = sorted(itertools.combinations(factors, 2), key=num_combinations)
    paired = (_paired(spec, pair, [rows for rows in factors if rows not in pair]) for pair in pairs)
    return _legal(spec, (settled(spec, point) for points in paired for point in points))


def _paired(spec: SweepSpec, pair: Sequence[Factor], others: Sequence[Factor]) -> Iterator[Point]:
    """Every pair of values. What is around them depends only on what conditions find in them: it is sought once."""
    around = list(itertools.islice(_surroundings(spec, others), MAX_SURROUNDINGS))
    best: dict[Hashable, Point] = {}
    for row in itertools.product(*([(values, _tested(spec, values)) for values in rows] for rows in pair)):
        point, kind = _joined(values for values, _ in row), tuple(tested for _, tested in row)
        if kind not in best:
            best[kind] = _best(spec, point, around)
        yield {**best[kind], **point}


def _best(spec: SweepSpec, point: Point, around: Sequence[Point]) -> Point:
    """The first with which all of `point` exists, or else most of it."""
    num_standing = partial(_num_standing, spec, point)
    whole = (rest for rest in around if num_standing(rest) == len(point))
    return next(whole, None) or max(around, key=num_standing)


def _surroundings(spec: SweepSpec, factors: Sequence[Factor]) -> Iterator[Point]:
    """The product of the values that conditions tell apart, of each kind the first."""
    firsts: list[dict[Hashable, Point]] = [{} for _ in factors]
    for first, rows in zip(firsts, factors, strict=True):
        for values in rows:
            first.setdefault(_tested(spec, values), values)
    return map(_joined, itertools.product(*(first.values() for first in firsts)))


def _tested(spec: SweepSpec, values: Point) -> tuple[bool, ...]:
    """Which parts of conditions and exclusions these values meet."""
    conditions = (*(when.keys for when in spec.when.values()), *spec.exclude_keys)
    return tuple(
        quick_key(values[name]) in options for keys in conditions for name, options in keys.items() if name in values
    )


def _num_standing(spec: SweepSpec, point: Point, rest: Point) -> int:
    """How many axes of `point` exist amid `rest`; -1 if it is excluded there."""
    values = settled(spec, {**rest, **point})
    return -1 if excluded(spec, values) else sum(is_active(spec, axis, values) for axis in point)


def linked_axes(spec: SweepSpec) -> set[str]:
    """The axes whose combinations `when` and `exclude` change; all others are crossed with them freely."""
    named = [*(when.condition for when in spec.when.values()), *spec.exclude]
    linked = {*spec.when, *(name for condition in named for name in condition)} & spec.axes.keys()
    return linked.union(*(group for group in spec.zipped if linked & set(group)))


def num_grid_points(spec: SweepSpec) -> int:
    """How many points the grid axes make, `seed` among them; what depends on a sampled axis counts as kept."""
    grids = {name for name, axis in spec.axes.items() if isinstance(axis, Grid)}
    linked = grids & linked_axes(spec)
    tied = sum(1 for _ in points_of(spec, factors_of(spec, linked)))
    return tied * num_combinations(factors_of(spec, grids - linked))


def _rows(spec: SweepSpec, group: Sequence[str]) -> Factor:
    columns = [_standing_for(spec, axis) for axis in group]
    return [dict(zip(group, row, strict=True)) for row in distinct(zip(*columns, strict=True))]


def _standing_for(spec: SweepSpec, name: str) -> tuple[Any, ...]:
    axis = spec.axes[name]
    if isinstance(axis, Grid):
        return axis.values
    conditions = [*(when.condition for when in spec.when.values()), *spec.exclude]
    named = [value for one in conditions for value in one.get(name, ()) if contains(axis, value)]
    return distinct([*ends(axis), *named])


def _legal(spec: SweepSpec, points: Iterable[Point]) -> Iterator[Point]:
    seen: set[Hashable] = set()
    for point in points:
        if excluded(spec, point):
            continue
        if spec.when:  # nothing else makes points equal
            key = tuple(map(quick_key, point.values()))
            if key in seen:
                continue
            seen.add(key)
        yield point


def _joined(row: Iterable[Point]) -> dict[str, Any]:
    return {name: value for part in row for name, value in part.items()}
