"""Carries batches of records to Postgres on one connection: keeps good rows moving whatever the bad ones are.

Three fates: written; set aside in a journal of its own, because MLflow does not have the run (another recorder tries
again later); rejected into `rejected.jsonl`, because Postgres will never take the row. Decides nothing about when.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict

from orchestrator.errors import DatabaseUnavailable
from orchestrator.masking import SECRET_PARAMETERS
from orchestrator.settings import LIVENESS
from orchestrator.tracking.bulk import (
    MetricRow,
    rows_of,
    without_late_words,
    write_decisions,
    write_findings,
    write_logs,
    write_rows,
)
from orchestrator.tracking.journal import Journal
from orchestrator.tracking.records import DecisionRow, FindingRow, LogLine, Note, Points, Record, to_json

RETRY_AFTER_S = (0.1, 2.0)  # the first and the longest pause before the database is tried again
STATEMENT_TIMEOUT_S = 60
IDLE_TIMEOUT_S = 30
KEEP_INHERITED_DAYS = 30  # how long points of unknown runs are handed on from recorder to recorder

# What a later try may mend: a lost connection, a restart, a standby, a missing privilege, a deadlock, a full disk.
Unavailable = (psycopg.Error, DatabaseUnavailable, OSError)
# What no later try mends: the rows themselves.
Unstorable = (psycopg.DataError, psycopg.IntegrityError, UnicodeError)

Row = TypeVar("Row")


def connect_by_url(url: str) -> psycopg.Connection[Any]:
    """A connection that notices within half a minute when the other side has vanished."""
    return psycopg.connect(
        url.replace("postgresql+psycopg://", "postgresql://", 1),
        autocommit=True,
        connect_timeout=10,
        application_name="orch recorder",
        **LIVENESS,
    )


def secrets_of(url: str) -> tuple[str, ...]:
    """What a workload may find out of how we log in, and no text may show; see `orchestrator.masking.hide`."""
    told = conninfo_to_dict(url.replace("postgresql+psycopg://", "postgresql://", 1))
    found = (*(told.get(name) for name in SECRET_PARAMETERS), os.environ.get("PGPASSWORD"))
    return tuple(str(one) for one in found if one)


class Drain:
    """The database's side of a recorder. Used by one thread; the counters may be read by any."""

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]], journal_dir: Path) -> None:
        self.error = ""  # why the database could not be reached at the last try
        self.num_rejected = 0
        self.unknown_runs: set[str] = set()  # of our own records, not of inherited ones
        self.set_aside: dict[bool, Journal] = {}  # by whether the records are inherited
        self._connect = connect
        self._journal_dir = journal_dir
        self._connection: psycopg.Connection[Any] | None = None
        self._pause_s = RETRY_AFTER_S[0]

    def store(self, records: Sequence[Record], inherited: bool = False) -> bool:
        """Gives every record one of its three fates; True if none was set aside or rejected.

        Raises one of `Unavailable`; then all of them must come again.
        """
        connection = self._connected()
        points = [record for record in records if isinstance(record, Points)]
        findings = [record for record in records if isinstance(record, FindingRow)]
        decisions = [record for record in records if isinstance(record, DecisionRow)]
        logs = [record for record in records if isinstance(record, LogLine)]
        rejected, unknown = _store_points(connection, points)
        rejected += _bisected(lambda rows: write_findings(connection, rows), findings)
        rejected += _bisected(lambda rows: write_decisions(connection, rows), decisions)
        rejected += _bisected(lambda rows: write_logs(connection, rows), logs)
        self._reject(rejected)
        is_aside = self._put_aside([point for point in points if point.run_id in unknown], inherited)
        self.error = ""
        self._pause_s = RETRY_AFTER_S[0]
        return not (rejected or is_aside)

    def failed(self, error: Exception) -> float:
        """Notes why `store` failed and returns how many seconds to wait before the next try."""
        self.error = str(error).strip().split("\n")[0] or type(error).__name__
        self.close()
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, RETRY_AFTER_S[1])
        return pause_s

    def cancel(self) -> None:
        """Ends a statement that is still running; may be called from another thread."""
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(psycopg.Error):  # the connection may end in this very moment
                connection.cancel_safe(timeout=1.0)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connected(self) -> psycopg.Connection[Any]:
        if self._connection is None or self._connection.closed:
            connection = self._connect()
            connection.rollback()  # whoever made it may have left a transaction open
            connection.autocommit = True
            connection.execute(f"set statement_timeout = '{STATEMENT_TIMEOUT_S}s'")
            # A suspended process must not keep rows from whoever goes on with its sweep.
            connection.execute(f"set idle_in_transaction_session_timeout = '{IDLE_TIMEOUT_S}s'")
            self._connection = connection
        return self._connection

    def _put_aside(self, points: Sequence[Points], inherited: bool) -> bool:
        """False if nothing is left to keep."""
        if inherited:
            oldest_ms = (time.time() - KEEP_INHERITED_DAYS * 86_400) * 1000
            points = [point for point in points if point.timestamp_ms >= oldest_ms]
        else:
            self.unknown_runs.update(point.run_id for point in points)
        if points and inherited not in self.set_aside:
            self.set_aside[inherited] = Journal.create(self._journal_dir)
        if points:
            self.set_aside[inherited].append([to_json(point) for point in points])
        return bool(points)

    def _reject(self, rejected: Sequence[tuple[Any, Exception]]) -> None:
        if not rejected:
            return
        lines = [json.dumps({"row": _plain(row), "why": str(error).split("\n")[0]}) for row, error in rejected]
        with open(self._journal_dir / "rejected.jsonl", "a") as file:
            file.write("\n".join(lines) + "\n")
        self.num_rejected += len(rejected)


def _store_points(
    connection: psycopg.Connection[Any], points: Sequence[Points]
) -> tuple[list[tuple[Any, Exception]], set[str]]:
    """Returns the rows that cannot be stored, with the reason, and the runs that MLflow does not have."""
    unknown: set[str] = set()

    def write(rows: Sequence[MetricRow]) -> None:
        unknown.update(write_rows(connection, rows))

    return _bisected(write, rows_of(without_late_words(connection, points)) if points else []), unknown


def _bisected(write: Callable[[Sequence[Row]], None], rows: Sequence[Row]) -> list[tuple[Row, Exception]]:
    """Writes as many rows as can be stored; returns the others with the reason. Halves a batch that is refused."""
    if not rows:
        return []
    try:
        write(rows)
    except Unstorable as error:
        if len(rows) == 1:
            return [(rows[0], error)]
        middle = len(rows) // 2
        return _bisected(write, rows[:middle]) + _bisected(write, rows[middle:])
    return []


def _plain(row: MetricRow | Note) -> Iterable[Any]:
    return list(row) if isinstance(row, MetricRow) else to_json(row)
