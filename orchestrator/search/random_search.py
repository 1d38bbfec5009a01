"""Random points of the sampled axes, fixed by `search.seed` alone. Knows nothing of cells: all get the same points.

Each axis has a stream of its own, so that adding an axis or asking for more samples leaves the earlier values alone.
"""

from __future__ import annotations

import random
from typing import Any

from orchestrator.search.searcher import all_points, space_size
from orchestrator.spec.domains import sample, value_key
from orchestrator.spec.sweep_spec import SweepSpec

MAX_SAMPLES = 1_000_000
MAX_REPEATS = 1000
"""After so many draws in a row that gave nothing new, a small space is listed instead, and a large one is given up."""


def draw_points(spec: SweepSpec) -> list[dict[str, Any]]:
    """`samples` distinct points, or all there are; one empty point when nothing is sampled."""
    axes, seed = spec.sampled_axes, spec.search.seed
    if not axes:
        return [{}]
    size = space_size(axes)
    wanted = min(spec.search.samples or 1, size or MAX_SAMPLES)
    points: dict[str, dict[str, Any]] = {}
    draw = repeats = 0
    while len(points) < wanted and repeats < MAX_REPEATS:
        point = {name: sample(axis, random.Random(f"{seed}/{name}/{draw}")) for name, axis in axes.items()}
        key = value_key(point)
        repeats = repeats + 1 if key in points else 0
        points.setdefault(key, point)
        draw += 1
    rest = (
        [] if size is None or len(points) == wanted else unseen_points(spec, set(points), random.Random(f"{seed}/rest"))
    )
    return [*points.values(), *rest][:wanted]


def unseen_points(spec: SweepSpec, seen: set[str], rng: random.Random) -> list[dict[str, Any]]:
    """The points of a small space that are not in `seen` (a set of `value_key`), in random order."""
    rest = [point for point in all_points(spec.sampled_axes) if value_key(point) not in seen]
    rng.shuffle(rest)
    return rest
