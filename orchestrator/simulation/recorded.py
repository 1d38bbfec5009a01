"""Curves that were recorded, by trial number or by config. Cannot say what copied weights would do."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import NotFound, OrchError
from orchestrator.simulation.curves import Curve
from orchestrator.trial import Candidate, Params

COLUMNS = ("trial", "step", "value")
MAX_STEP = 2**63 - 1  # as in the database


@dataclass(frozen=True)
class RecordedCurve:
    values: Mapping[int, float | None]  # by step, ascending
    seconds_per_step: float = 1.0

    @property
    def steps(self) -> Sequence[int]:
        return tuple(self.values)

    def value(self, step: int) -> float | None:
        return self.values[step]


class Recorded:
    """Recorded curves by a key; `key_of` says which one is a trial's."""

    def __init__(self, curves: Mapping[str, RecordedCurve], key_of: Callable[[int, Candidate], str]) -> None:
        self._curves, self._key_of = curves, key_of

    def of(self, number: int, candidate: Candidate) -> RecordedCurve | None:
        return self._curves.get(self._key_of(number, candidate))

    def copied(self, number: int, source: Curve, step: int, params: Params) -> Curve:
        raise OrchError("pbt goes on from copied weights, and no recording says how; leave --curves out")


def read_curves(path: Path) -> Recorded:
    """Reads a CSV file with the columns trial, step, value. Raises OrchError for what is not such a file.

    A trial's number is its place in the sweep, from 0. An empty value is a report without the objective.
    """
    try:
        with path.open(newline="") as file:
            points = list(_points(path, csv.DictReader(file)))
    except OSError as error:
        raise NotFound(f"--curves  {path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise OrchError(f"--curves  {path} is no CSV file: {error}") from None
    return Recorded(curves_of(points), lambda number, candidate: str(number))


def curves_of(
    points: Iterable[tuple[str, int, float | None]], seconds: Mapping[str, float] | None = None
) -> dict[str, RecordedCurve]:
    """Curves of (key, step, value) in any order; of a step that comes twice the later value counts.

    One that ends at step 0 or before is none: nothing was trained.
    `seconds` is how long each trial took in all, where that is known; else a step takes a second.
    """
    values: dict[str, dict[int, float | None]] = {}
    for key, step, value in points:
        values.setdefault(key, {})[step] = value
    result = {}
    for key, by_step in values.items():
        took_s, last = (seconds or {}).get(key), max(by_step)
        if last > 0:
            result[key] = RecordedCurve(dict(sorted(by_step.items())), took_s / last if took_s else 1.0)
    return result


def _points(path: Path, rows: csv.DictReader[str]) -> Iterable[tuple[str, int, float | None]]:
    if missing := [name for name in COLUMNS if name not in (rows.fieldnames or ())]:
        raise OrchError(f"{path}:1  no column {', '.join(missing)}; needed: {','.join(COLUMNS)}")
    for row in rows:
        try:
            trial, step = int(row["trial"]), int(row["step"])
            value = float(row["value"]) if row["value"].strip() else None
        except (ValueError, AttributeError, TypeError):
            raise OrchError(
                f"{path}:{rows.line_num}  trial and step are whole numbers, value a number or empty"
            ) from None
        if not (trial >= 0 and 0 <= step <= MAX_STEP):
            raise OrchError(f"{path}:{rows.line_num}  trial and step count from 0, step to 2**63 - 1")
        yield str(trial), step, value
