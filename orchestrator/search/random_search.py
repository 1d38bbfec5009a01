"""Points of the sampled axes, fixed by `search.seed` and the file alone: no result changes them.

The draws are the same in all cells; a cell keeps those that are new and not excluded there. At random each axis has a
stream of its own, so that another axis or more samples leave the earlier values alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from orchestrator.search.searcher import deciding_axes, enqueued_in, points_in, settled_point
from orchestrator.spec.domains import sample, value_key
from orchestrator.spec.sweep_spec import SweepSpec
from orchestrator.trial import Params

MAX_REPEATS = 1000
"""After so many draws in a row that gave nothing new, a small space is listed instead, and a large one is given up."""

Draw = Callable[[int], dict[str, Any]]  # the values of all sampled axes at a number, from 0


def random_draw(spec: SweepSpec) -> Draw:
    axes, seed = spec.sampled_axes, spec.search.seed
    return lambda number: {name: sample(axis, random.Random(f"{seed}/{name}/{number}")) for name, axis in axes.items()}


class Points:
    """The points that each cell gets, drawn once for all cells that are alike in what decides about points."""

    def __init__(self, spec: SweepSpec, samples: int, draw: Draw) -> None:
        self._spec, self._samples, self._draw = spec, samples, draw
        self._raw: list[dict[str, Any]] = []
        self._deciding = deciding_axes(spec)
        self._found: dict[str, list[dict[str, Any]]] = {}

    def of(self, cell: Params) -> list[dict[str, Any]]:
        """`samples` distinct points, those of `enqueue` first, or all there are; one empty point without sampled axes.

        Raises nothing when there are fewer: the caller says so.
        """
        key = value_key({name: value for name, value in cell.items() if name in self._deciding})
        if key not in self._found:
            self._found[key] = self._points(cell) if self._spec.sampled_axes else [{}]
        return self._found[key]

    def _points(self, cell: Params) -> list[dict[str, Any]]:
        listed = points_in(self._spec, cell, listing_limit(self._samples))
        wanted = self._samples if listed is None else min(self._samples, len(listed))
        found: dict[str, dict[str, Any]] = {}
        repeats, candidates = 0, self._candidates(cell)
        while len(found) < wanted and repeats < MAX_REPEATS:
            point = settled_point(self._spec, cell, next(candidates))
            key = "" if point is None else value_key(point)
            if point is None or key in found:
                repeats += 1
            else:
                found[key], repeats = point, 0
        rest = unseen_points(listed or [], found, random.Random(f"{self._spec.search.seed}/rest"))
        return [*found.values(), *rest][:wanted]

    def _candidates(self, cell: Params) -> Iterator[dict[str, Any]]:
        for number, named in enumerate(enqueued_in(self._spec, cell)):
            yield {**self._drawn(number), **named}
        number = 0
        while True:
            yield self._drawn(number)
            number += 1

    def _drawn(self, number: int) -> dict[str, Any]:
        while len(self._raw) <= number:
            self._raw.append(self._draw(len(self._raw)))
        return self._raw[number]


def listing_limit(samples: int) -> int:
    """A space of at most so many points is known point by point; in a larger one draws are rarely repeated."""
    return max(1000, 10 * samples)


def unseen_points(listed: list[dict[str, Any]], seen: Mapping[str, Any], rng: random.Random) -> list[dict[str, Any]]:
    """Those of the listed points that are not in `seen` (by `value_key`), in random order."""
    rest = [point for point in listed if value_key(point) not in seen]
    rng.shuffle(rest)
    return rest
