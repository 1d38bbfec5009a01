"""A table of plain values and its three written forms: for people, for spreadsheets, for machines."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from orchestrator.trial import jsonable

Format = Literal["table", "csv", "json"]


@dataclass(frozen=True)
class Table:
    """Named columns and rows of equal length. `title` and `notes` are for people only."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    notes: Sequence[str] = ()

    def records(self) -> list[dict[str, Any]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def as_json(table: Table) -> str:
    """A list of objects; NaN and infinity as the texts `NaN`, `Infinity`, since JSON has no word for them."""
    return json.dumps([{name: _plain(value) for name, value in record.items()} for record in table.records()])


def as_csv(table: Table) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows([[_csv_cell(value) for value in row] for row in table.rows])
    return buffer.getvalue().rstrip("\n")


def short(value: Any) -> str:
    """A value as people read it: four significant digits, dashes for nothing."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _short_float(value)
    if isinstance(value, dict | list):
        return json.dumps(value)
    if hasattr(value, "strftime"):
        return str(value.strftime("%Y-%m-%d %H:%M:%S"))
    return str(value)


def counted(number: int, noun: str) -> str:
    """`1 trial`, `3 trials`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def _short_float(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return f"{value:.4g}"


def _plain(value: Any) -> Any:
    if hasattr(value, "isoformat"):
        return value.isoformat()
    try:
        return jsonable(value)
    except TypeError:  # decimals, uuids and other types of PostgreSQL read best as text
        return str(value)


def _csv_cell(value: Any) -> Any:
    if isinstance(value, dict | list):
        return json.dumps(jsonable(value))
    return "" if value is None else _plain(value)
