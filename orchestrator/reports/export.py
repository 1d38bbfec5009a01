"""Copies what a sweep's views hold into a file: Parquet, CSV or JSON Lines. Computes nothing, reads views only.

PostgreSQL's COPY writes the rows and they pass through here: a file of any length takes the memory of one block.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from orchestrator import __version__
from orchestrator.reports.source import Query, quoted, sweep_facts, view_of
from orchestrator.reports.spec_text import spec_text
from orchestrator.reports.status import state_counts
from orchestrator.reports.table import counted
from orchestrator.trial import TrialState

if TYPE_CHECKING:
    import pyarrow

    from orchestrator.database.reader import Snapshot

Form = Literal["parquet", "csv", "jsonl"]
FORMS: dict[str, str] = {  # and how COPY is asked for it
    "parquet": "format csv",
    "csv": "format csv, header",
    # JSON spells out control characters, so neither of these two is ever in the way
    "jsonl": r"format csv, delimiter E'\x01', quote E'\x02'",
}
WHAT = {  # and in which order. Not `metrics`: to sort twelve million rows takes more room than a reader may take
    "runs": "order by run.trial",
    "metrics": "",
    "final_metrics": "order by own.trial, own.key",
    "findings": "order by own.created_at, own.trial, own.step",
    "decisions": "order by own.decided_at, own.trial, own.step",
    "logs": "order by own.trial nulls first, own.attempt, own.line_number",
}
PLAIN = {  # PostgreSQL's type -> Arrow's; any other is written as JSON text
    "double precision": "double",
    "bigint": "int64",
    "integer": "int64",
    "boolean": "bool",
    "text": "string",
    "timestamp with time zone": "timestamp[us, UTC]",
}
IN_BOTH = ("run_id", "trial", "state", "verdict")  # columns of `runs` that `sweep_<name>` has, the same ones
BLOCK_BYTES = 16_000_000  # of CSV: some 150,000 points, a row group of the Parquet file


@dataclass(frozen=True)
class Exported:
    num_rows: int
    num_columns: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Column:
    name: str
    source: str  # what it is in the query
    sql_type: str

    def expression(self, form: Form) -> str:
        if form == "jsonl":  # `row_to_json` writes what it is
            return self.source
        if self.sql_type == "boolean":  # `true`: COPY's own word is `t`
            return f"{self.source}::text"
        if self.sql_type in PLAIN:
            return self.source
        return f"to_jsonb({self.source})::text"


def export(snapshot: Snapshot, sweep: str, what: str, form: Form, out: BinaryIO) -> Exported:
    """Writes the view `what` of one sweep (`runs`: one row a trial, see docs/reports.md) as it was at one moment.

    Numbers keep all their digits; NaN and infinity are written as such (JSON Lines: the texts `NaN`, `Infinity`).
    Raises NotFound with the nearest name, QueryError, DatabaseUnavailable, and OSError from `out`.
    """
    about = _about(snapshot.query, sweep, what)
    columns = _columns(snapshot.query, sweep, what)
    notes = _unfinished(snapshot.query, sweep)
    with snapshot.copied(_select(columns, sweep, what, form), (sweep,), FORMS[form]) as rows:
        if form == "parquet":
            num_rows = _write_parquet(rows, columns, about, out)
        else:
            num_rows = _write_lines(rows, out) - (form == "csv")  # its header
    return Exported(num_rows, len(columns), notes)


def _about(query: Query, sweep: str, what: str) -> dict[str, str]:
    """What a reader of the file must know besides its rows. Raises NotFound."""
    facts = sweep_facts(query, sweep)
    _, [(moment,)] = query("select now()")
    return {
        "orch.version": __version__,
        "orch.exported_at": moment.isoformat(),
        "orch.what": what,
        "orch.sweep": sweep,
        "orch.state": facts.state,
        "orch.question": facts.question,
        "orch.metric": facts.metric,
        "orch.mode": facts.mode,
        "orch.axes": json.dumps(facts.axes),
        "orch.spec": spec_text(query, sweep),
    }


def _unfinished(query: Query, sweep: str) -> tuple[str, ...]:
    counts = state_counts(query, sweep)
    waiting = sum(count for state, count in counts.items() if TrialState(state).is_unfinished)
    if not waiting:
        return ()
    return (f"{waiting} of {counted(sum(counts.values()), 'trial')} of {sweep} had no result yet",)


def _columns(query: Query, sweep: str, what: str) -> list[_Column]:
    if what != "runs":
        return _columns_of(query, f"orch.{what}", "own")
    columns = _columns_of(query, view_of(sweep), "own")
    taken = {column.name for column in columns}
    for column in _columns_of(query, "orch.runs", "run"):
        if column.name not in IN_BOTH:
            while (name := column.name) in taken:
                column = _Column(f"{name}_run", column.source, column.sql_type)
            columns.append(column)
            taken.add(column.name)
    return columns


def _columns_of(query: Query, view: str, alias: str) -> list[_Column]:
    _, rows = query(
        "select attname, format_type(atttypid, null) from pg_attribute"
        " where attrelid = to_regclass(%s) and attnum > 0 and not attisdropped order by attnum",
        (view,),
    )
    return [_Column(name, f"{alias}.{quoted(name)}", sql_type) for name, sql_type in rows]


def _select(columns: Sequence[_Column], sweep: str, what: str, form: Form) -> str:
    """The query; its one parameter is the sweep's name."""
    shown = ", ".join(f"{column.expression(form)} as {quoted(column.name)}" for column in columns)
    if what == "runs":
        source = f"{view_of(sweep)} as own join orch.runs as run on run.trial = own.trial where run.sweep = %s"
    else:
        source = f"orch.{what} as own where own.sweep = %s"
    select = f"select {shown.replace('%', '%%')} from {source} {WHAT[what]}"
    return f"select row_to_json(line)::text from ({select}) as line" if form == "jsonl" else select


def _write_lines(rows: Iterator[bytes], out: BinaryIO) -> int:
    num_rows = 0
    for row in rows:
        out.write(row)
        num_rows += 1
    return num_rows


def _write_parquet(rows: Iterator[bytes], columns: Sequence[_Column], about: Mapping[str, str], out: BinaryIO) -> int:
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    types: dict[str, Any] = {name: pyarrow.type_for_alias(name) for name in PLAIN.values() if "[" not in name}
    types["timestamp[us, UTC]"] = pyarrow.timestamp("us", tz="UTC")
    fields = [(column.name, types[PLAIN.get(column.sql_type, "string")]) for column in columns]
    schema = pyarrow.schema(fields, metadata=dict(about))
    num_rows = 0
    with ParquetWriter(out, schema, compression="zstd") as writer:
        for block in _blocks(rows):
            table = _parsed(block, schema)
            writer.write_table(table)
            num_rows += table.num_rows
    return num_rows


def _blocks(rows: Iterator[bytes]) -> Iterator[bytes]:
    """Whole rows, about BLOCK_BYTES of them together."""
    block = bytearray()
    for row in rows:
        block += row
        if len(block) >= BLOCK_BYTES:
            yield bytes(block)
            block.clear()
    if block:
        yield bytes(block)


def _parsed(block: bytes, schema: pyarrow.Schema) -> pyarrow.Table:
    """The rows as COPY wrote them. Only an empty cell without quotes is null: NaN is a number, and `""` a text."""
    from pyarrow import BufferReader, csv

    return csv.read_csv(
        BufferReader(block),
        csv.ReadOptions(column_names=schema.names, block_size=len(block)),
        csv.ParseOptions(newlines_in_values=True),
        csv.ConvertOptions(
            column_types=schema, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
        ),
    )
