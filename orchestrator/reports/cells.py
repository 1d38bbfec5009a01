"""Groups a sweep's trials by what they were asked, and counts in a group. Reads nothing, averages nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orchestrator.trial import TrialState, canonical_json

Record = Mapping[str, Any]  # of `source.trial_records`
Cell = tuple[list[Any], list[Record]]  # the values of its axes, and its trials


def cells_of(records: Iterable[Record], axes: Sequence[str]) -> list[Cell]:
    """The trials by their values of the axes, in the order of trials; None for an axis that a workload has not."""
    cells: dict[str, Cell] = {}
    for record in records:
        values = [record["config"].get(axis) for axis in axes]
        cells.setdefault(canonical_json(values), (values, []))[1].append(record)
    return list(cells.values())


def alike(records: Iterable[Record], but_for: Iterable[str]) -> list[list[Record]]:
    """All else equal: the trials that agree in every parameter of the sweep but these, in the order of trials."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        rest = {name: value for name, value in record["params"].items() if name not in but_for}
        groups.setdefault(canonical_json(rest), []).append(record)
    return list(groups.values())


def is_result(record: Record) -> bool:
    return TrialState(record["state"]).is_result


def is_sound(record: Record) -> bool:
    return TrialState(record["state"]).is_sound


def is_diverged(record: Record) -> bool:
    return TrialState(record["state"]) is TrialState.DIVERGED


def diverged_of(records: Iterable[Record]) -> tuple[int, int]:
    """How many diverged of how many results."""
    results = list(filter(is_result, records))
    return sum(map(is_diverged, results)), len(results)


def unstable_of(records: Iterable[Record]) -> tuple[int, int]:
    """How many are unstable, diverged ones included, of how many results that the sweep's rule could judge."""
    known = [record["unstable"] for record in filter(is_result, records) if record["unstable"] is not None]
    return sum(known), len(known)
