"""Puts the views of `views/*.sql` into schema `orch` and builds `orch.sweep_<name>`. Stores no data of its own.

Everything in schema `orch` can be dropped and is made again at the next start. Views that somebody built on top of ours
are dropped with them when ours change.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from orchestrator.errors import NotFound

SCHEMA = "orch"
FOLDER = Path(__file__).parent / "views"
CORE_VIEWS = ("findings", "decisions", "logs", "metrics", "final_metrics", "runs", "sweeps", "stability", "archived")
"""A view after those it reads."""
SWEEP_TEMPLATE = "sweep"
FIXED_COLUMNS = ("run_id", "trial", "state", "diverged", "verdict")
SQL_TYPES = ("double precision", "bigint", "boolean", "text", "jsonb")
MAX_COLUMNS = 500
NAME_BYTES = 63  # PostgreSQL cuts longer names, so two could become one
INDEXED = re.compile(r"(layer|block|expert|stage)?\d+")  # a part of a metric's name that numbers, as in router/load/3
PER_BLOCK = ("grad/preclip/", "update/ratio/", "memory/saved_bytes/")  # a series for each block, and `total`
LAST_VALUE = """(
        select metric.last from orch.final_metrics as metric
        where metric.run_id = trial.run_id and metric.key = {}
    )"""
STAMP = "orch views "  # what our comments on the schema and on sweep views begin with

Connection = psycopg.Connection[Any]


@dataclass(frozen=True)
class Column:
    """One column of `sweep_<name>`: a field of the config, or the last value of a metric."""

    name: str
    source: str
    sql_type: str
    is_metric: bool

    def expression(self) -> sql.Composable:
        """Its definition in the view's query, where `trial` is the ledger's row."""
        if self.is_metric:
            return sql.SQL(LAST_VALUE).format(sql.Literal(self.source))
        if self.sql_type == "jsonb":
            return sql.SQL("trial.config -> {}").format(sql.Literal(self.source))
        return sql.SQL("(trial.config ->> {})::{}").format(sql.Literal(self.source), sql.SQL(self.sql_type))


@dataclass(frozen=True)
class SweepView:
    """What `orch.sweep_<name>` should look like now."""

    sweep_id: int
    name: str
    columns: tuple[Column, ...]

    @property
    def identifier(self) -> sql.Identifier:
        return sql.Identifier(SCHEMA, f"sweep_{self.name}")

    @property
    def stamp(self) -> str:
        """Equal for equal sets of columns, in whatever order they came to be."""
        parts = sorted([column.name, column.source, column.sql_type] for column in self.columns)
        return STAMP + _digest(json.dumps([self.sweep_id, files_digest(), parts]))


def apply(connection: Connection) -> bool:
    """Makes schema `orch` with its views, in one transaction, unless they are those of this program already.

    Needs the ledger's and MLflow's tables. All sweep views are built again too. Returns whether anything was done.
    """
    with connection.transaction():
        if is_current(connection):
            return False
        connection.execute("select pg_advisory_xact_lock(hashtext('orch views'))")
        if is_current(connection):  # another command was faster
            return False
        if not _exists(connection, SCHEMA):  # `if not exists` would ask for the right to create one regardless
            connection.execute("create schema orch")
        _drop_views(connection)
        for name in CORE_VIEWS:
            connection.execute((FOLDER / f"{name}.sql").read_bytes())
        for name in _sweeps(connection):
            rebuild_sweep_view(connection, name)
        # Last: a reader who comes in between finds the old stamp.
        connection.execute(sql.SQL("comment on schema orch is {}").format(sql.Literal(STAMP + files_digest())))
    return True


def is_current(connection: Connection) -> bool:
    """True if the views in the database come from the files of this program. One short question."""
    row = connection.execute("select obj_description(to_regnamespace('orch'), 'pg_namespace')").fetchone()
    return row is not None and row[0] == STAMP + files_digest()


def rebuild_sweep_view(connection: Connection, sweep_name: str, lock_wait_s: float = 2.0) -> bool:
    """Makes or brings up to date `orch.sweep_<name>` in one transaction. Readers keep their rights.

    New columns are appended where the others stay as they are; else the view is made anew. False, and no change, when
    somebody reads the old view for longer than `lock_wait_s`: waiting on would make every other reader wait behind us.
    Raises NotFound when there is no such sweep.
    """
    try:
        with connection.transaction():
            _bring_up_to_date(connection, sweep_name, lock_wait_s)
    except psycopg.errors.LockNotAvailable:
        return False
    return True


def sweep_view_is_stale(connection: Connection, sweep_name: str) -> bool:
    """True if a metric or field came up that `orch.sweep_<name>` does not show, or there is no such view yet."""
    view = _plan(connection, sweep_name)
    return _stamp_of(connection, view) != view.stamp


def drop_sweep_view(connection: Connection, sweep_name: str) -> None:
    """Takes away the view of a sweep that was archived or purged."""
    name = sql.Identifier(SCHEMA, f"sweep_{sweep_name}")
    connection.execute(sql.SQL("drop view if exists {} cascade").format(name))


def is_shown(metric: str) -> bool:
    """False for a metric that stays in `final_metrics`: an indexed one, that of a single block, too long a name."""
    if metric.startswith(PER_BLOCK) and not metric.endswith("/total"):
        return False
    if any(INDEXED.fullmatch(part) for part in metric.split("/")):
        return False
    return len(metric.encode()) <= NAME_BYTES


def plan_columns(fields: Iterable[tuple[str, str]], metrics: Iterable[str], objective: str) -> tuple[Column, ...]:
    """The columns after the fixed ones: all fields in their order, then the shown metrics, the objective first.

    `fields` are (name, SQL type). Where there would be more than 500 columns, the alphabetically last metrics go.
    Raises ValueError for a type that is not one of SQL_TYPES, or a field whose name is a fixed column or too long.
    """
    columns = [_field_column(name, sql_type) for name, sql_type in fields]
    taken = {*FIXED_COLUMNS, *(column.name for column in columns)}
    for metric in sorted(set(metrics), key=lambda name: (name != objective, name)):
        name = metric
        while name in taken:
            name += "_metric"
        if is_shown(metric) and len(name.encode()) <= NAME_BYTES and len(columns) + len(FIXED_COLUMNS) < MAX_COLUMNS:
            columns.append(Column(name, metric, "double precision", is_metric=True))
            taken.add(name)
    return tuple(columns)


def _field_column(name: str, sql_type: str) -> Column:
    if sql_type not in SQL_TYPES:
        raise ValueError(f"field {name}: {sql_type!r} is none of {', '.join(SQL_TYPES)}")
    if len(name.encode()) > NAME_BYTES:
        raise ValueError(f"field {name}: a name may have at most {NAME_BYTES} bytes to become a column")
    # A field called `trial` or `state` must not take the place of the column everybody counts on.
    return Column(f"{name}_param" if name in FIXED_COLUMNS else name, name, sql_type, is_metric=False)


def _bring_up_to_date(connection: Connection, sweep_name: str, lock_wait_s: float) -> None:
    connection.execute("select pg_advisory_xact_lock(hashtext(%s))", (f"orch view {sweep_name}",))
    view = _plan(connection, sweep_name)
    if _stamp_of(connection, view) == view.stamp:
        return
    connection.execute("select set_config('lock_timeout', %s, true)", (f"{lock_wait_s * 1000:.0f}ms",))
    columns = _appended(_columns_of(connection, view), view.columns)
    if columns is None:
        connection.execute(sql.SQL("drop view if exists {} cascade").format(view.identifier))
    connection.execute(_definition(view, columns or view.columns))
    comment = sql.SQL("comment on view {} is {}")
    connection.execute(comment.format(view.identifier, sql.Literal(view.stamp)))


def _plan(connection: Connection, sweep_name: str) -> SweepView:
    row = connection.execute(
        """
        select
            sweep.id, sweep.columns, sweep.metric,
            array(
                select distinct latest.key
                from orch_ledger.trials as trial
                join public.latest_metrics as latest on latest.run_uuid = trial.run_id
                where trial.sweep_id = sweep.id
            )
        from orch_ledger.sweeps as sweep
        where sweep.name = %s and sweep.archived_at is null
        """,
        (sweep_name,),
    ).fetchone()
    if row is None:
        raise NotFound(f"there is no sweep called {sweep_name}")
    sweep_id, fields, objective, metrics = row
    return SweepView(sweep_id, sweep_name, plan_columns(fields, metrics, objective))


def _definition(view: SweepView, columns: Sequence[Column]) -> sql.Composed:
    shown = [sql.SQL(",\n    {} as {}").format(column.expression(), sql.Identifier(column.name)) for column in columns]
    template = (FOLDER / f"{SWEEP_TEMPLATE}.sql").read_text()
    return sql.SQL(template).format(
        view=view.identifier,
        columns=sql.Composed(shown),
        name=sql.Literal(view.name),
        sweep_id=sql.Literal(view.sweep_id),
    )


def _appended(present: Sequence[tuple[str, str]], wanted: Sequence[Column]) -> list[Column] | None:
    """The wanted columns with those at hand first, in their order; None if one of these is gone or changed."""
    by_name = {column.name: column for column in wanted}
    kept = [by_name.pop(name, None) for name, _ in present]
    if not present or any(
        column is None or column.sql_type != sql_type for column, (_, sql_type) in zip(kept, present, strict=True)
    ):
        return None
    return [column for column in kept if column is not None] + list(by_name.values())


def _columns_of(connection: Connection, view: SweepView) -> list[tuple[str, str]]:
    """(name, type) of the view's columns after the fixed ones; empty when there is no view."""
    rows = connection.execute(
        """
        select attname, format_type(atttypid, atttypmod)
        from pg_attribute
        where attrelid = to_regclass(%s) and attnum > %s and not attisdropped
        order by attnum
        """,
        (view.identifier.as_string(connection), len(FIXED_COLUMNS)),
    )
    return rows.fetchall()


def _stamp_of(connection: Connection, view: SweepView) -> str | None:
    query = "select obj_description(to_regclass(%s), 'pg_class')"
    row = connection.execute(query, (view.identifier.as_string(connection),)).fetchone()
    stamp: str | None = row[0] if row else None
    return stamp


def _exists(connection: Connection, schema: str) -> bool:
    return connection.execute("select from pg_namespace where nspname = %s", (schema,)).fetchone() is not None


def _drop_views(connection: Connection) -> None:
    rows = connection.execute("select viewname from pg_views where schemaname = 'orch'").fetchall()
    for (name,) in rows:
        connection.execute(sql.SQL("drop view if exists {} cascade").format(sql.Identifier(SCHEMA, name)))


def _sweeps(connection: Connection) -> list[str]:
    rows = connection.execute("select name from orch_ledger.sweeps where archived_at is null").fetchall()
    return [name for (name,) in rows]


def files_digest() -> str:
    """Names the views of this program."""
    return _digest("".join((FOLDER / f"{name}.sql").read_text() for name in (*CORE_VIEWS, SWEEP_TEMPLATE)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
