"""Tries the combinations a sweep will train against the workload's own rules between fields, before anything starts.

All points that `when`, `zip` and `exclude` leave are tried, up to `MAX_POINTS`; beyond that pairs of values, up to as
many: a rule between three axes of a huge grid may then be seen only when its trials are made.
Ranges stand in with both ends, and the seed, which is a replicate, with its first value.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from orchestrator.errors import Problem, SpecError
from orchestrator.spec.points import factors_of, linked_axes, num_combinations, pairs_of, points_of
from orchestrator.spec.problems import Problems
from orchestrator.spec.sweep_spec import SEED, SweepSpec
from orchestrator.spec.yaml_text import flow

T = TypeVar("T")
MAX_POINTS = 50_000  # about half a second


def check_combinations(
    spec: SweepSpec,
    resolve: Callable[[Mapping[str, Any]], object],
    where: Callable[[str], str],
    problems: Problems,
) -> None:
    """Adds a problem, once, for each different complaint of `resolve`, at the line of the field it names."""
    factors = factors_of(spec, spec.axes)
    if SEED in spec.axes and SEED not in linked_axes(spec):
        factors = [rows if SEED not in rows[0] else rows[:1] for rows in factors]
    listed = points_of if num_combinations(factors) <= MAX_POINTS else pairs_of
    for point in itertools.islice(listed(spec, factors), MAX_POINTS):
        try:
            resolve({**spec.fixed, **point})
        except ValueError as error:
            for path, message in _complaints(error):
                problems.add(where(path), path, message)


def resolved(spec: SweepSpec, resolve: Callable[[Mapping[str, Any]], T], params: Mapping[str, Any]) -> T:
    """The config of one trial. Raises SpecError, which names the trial, where `resolve` refuses it after all."""
    try:
        return resolve(params)
    except ValueError as error:
        trial = flow({name: params[name] for name in spec.axes})
        why = f"in the trial {trial}; leave such points out by exclude or when"
        found = _complaints(error)
        raise SpecError([Problem(spec.where(path), path, f"{message}, {why}") for path, message in found]) from error


def _complaints(error: ValueError) -> Iterator[tuple[str, str]]:
    """(path in the file, message) of pydantic's error, or of one that carries the field in `.name`."""
    if not isinstance(error, ValidationError):
        yield _path(getattr(error, "name", None)), str(error)
        return
    for item in error.errors():
        cause = item.get("ctx", {}).get("error")
        place = [str(part) for part in item["loc"]]
        message = str(cause) if isinstance(cause, Exception) else item["msg"]
        yield _path(*place, getattr(cause, "name", None)), message


def _path(*parts: str | None) -> str:
    return ".".join(["params", *(str(part) for part in parts if part)])
