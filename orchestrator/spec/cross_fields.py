"""Tries the combinations a sweep will train against the workload's own rules between fields, before anything starts.

All grid points are tried up to `MAX_POINTS`; beyond that every pair of values, the other axes at their first value: a
rule between three axes of a huge grid may then be seen only when its trial starts. Ranges stand in with both ends.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from orchestrator.spec.domains import Domain, ends
from orchestrator.spec.problems import Problems

MAX_POINTS = 20_000


def check_combinations(
    fixed: Mapping[str, Any],
    axes: Mapping[str, Domain],
    resolve: Callable[[Mapping[str, Any]], object],
    where: Callable[[str], str],
    problems: Problems,
) -> None:
    """Adds a problem, once, for each different complaint of `resolve`, at the line of the field it names."""
    for point in _points({name: ends(axis) for name, axis in axes.items()}):
        try:
            resolve({**fixed, **point})
        except ValueError as error:
            for name, message in _complaints(error):
                path = f"params.{name}" if name else "params"
                problems.add(where(path), path, message)


def _points(values: Mapping[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    if math.prod(len(options) for options in values.values()) <= MAX_POINTS:
        for point in itertools.product(*values.values()):
            yield dict(zip(values, point, strict=True))
        return
    first = {name: options[0] for name, options in values.items()}
    pairs = ((a, b, x, y) for a, b in itertools.combinations(values, 2) for x in values[a] for y in values[b])
    for left, right, x, y in itertools.islice(pairs, MAX_POINTS):
        yield {**first, left: x, right: y}


def _complaints(error: ValueError) -> Iterator[tuple[str, str]]:
    """(dotted field or empty, message) of pydantic's error, or of one that carries the field in `.name`."""
    if not isinstance(error, ValidationError):
        yield str(getattr(error, "name", "") or ""), str(error)
        return
    for item in error.errors():
        cause = item.get("ctx", {}).get("error")
        place = [str(part) for part in item["loc"]]
        name = getattr(cause, "name", None)
        message = str(cause) if isinstance(cause, Exception) else item["msg"]
        yield ".".join([*place, str(name)] if name else place), message
