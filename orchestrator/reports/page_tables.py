"""Tables as a page has them: texts of bounded length, few rows, and in words what is left out and where it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.reports.table import Table, short
from orchestrator.spec.domains import is_number

MAX_ROWS = 60  # of a table
MAX_TEXT = 400  # characters of a table's field
MAX_WORD = 34  # characters that are not wrapped


@dataclass(frozen=True)
class Shown:
    """A table as the page has it: texts of bounded length, and what is left out."""

    title: str
    columns: Sequence[str]
    kinds: Sequence[str]  # by column: number; long, which may be wrapped; or word
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]


def whole(table: Table, all_of_it: str, num_rows: int | None = None, limit: int | None = None) -> Shown:
    """The first rows, and the command that shows all `num_rows`."""
    rows = table.rows[: limit or MAX_ROWS]
    missing = (num_rows or len(table.rows)) - len(rows)
    left_out = [f"{missing} more: {all_of_it}"] if missing > 0 else []
    texts = [[cut(short(value), MAX_TEXT) for value in row] for row in rows]
    kinds = [_kind([row[place] for row in rows]) for place in range(len(table.columns))]
    return Shown(table.title, table.columns, kinds, texts, [*table.notes, *left_out])


def _kind(values: Sequence[Any]) -> str:
    there = [value for value in values if value is not None]
    if there and all(map(is_number, there)):
        return "number"
    return "long" if any(len(short(value)) > MAX_WORD for value in there) else "word"


def comparison_of(table: Table, num_axes: int, mode: str, all_of_it: str) -> Shown:
    """All cells, or those with the best means."""
    table = replace(table, title="")  # the question, which the page has already
    if len(table.rows) <= MAX_ROWS:
        return whole(table, all_of_it)
    mean, sign = num_axes + 1, 1 if mode == "min" else -1  # behind the axes: n, then the first metric's mean
    ranked = sorted(table.rows, key=lambda row: (row[mean] is None, sign * (row[mean] or 0)))
    notes = [f"the {MAX_ROWS} best of {len(table.rows)} cells by {table.columns[mean]}", *table.notes]
    return whole(replace(table, rows=ranked, notes=notes), all_of_it)


def cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}… ({len(text) - length} characters more)"
