"""Which of many points no other one beats. Knows nothing of runs."""

from __future__ import annotations

from collections.abc import Sequence


def pareto_front(points: Sequence[Sequence[float]], modes: Sequence[str]) -> list[int]:
    """The places of the points that no other one dominates, by their first value, the best first.

    A point dominates another if it is at least as good in all values and better in one. Points that are equal are all
    in the front. `modes` has a `min` or `max` for each value; all values are finite.
    """
    signs = [1.0 if mode == "min" else -1.0 for mode in modes]
    costs = [tuple(sign * value for sign, value in zip(signs, point, strict=True)) for point in points]
    front: list[int] = []
    for place in sorted(range(len(costs)), key=costs.__getitem__):  # whoever dominates a point stands before it
        if not any(_dominates(costs[other], costs[place]) for other in front):
            front.append(place)
    return front


def _dominates(left: Sequence[float], right: Sequence[float]) -> bool:
    return left != right and all(one <= other for one, other in zip(left, right, strict=True))
