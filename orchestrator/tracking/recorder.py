"""Takes what trials report, makes it safe on disk at once, and carries it to Postgres when Postgres is there.

Two threads: one appends to the journal, so that a slow or absent database never holds up a trial; the other drains
journals into the database. Does not create runs, and never judges a value.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psycopg

from orchestrator.errors import OrchError
from orchestrator.tracking.drain import Drain, Unavailable, connect_by_url, secrets_of
from orchestrator.tracking.journal import Journal, orphans
from orchestrator.tracking.records import (
    DecisionRow,
    FindingRow,
    LogLine,
    MetricError,
    Note,
    Points,
    Record,
    checked,
    discreet,
    from_json,
    legal_key,
    num_points,
    real_number,
    to_json,
    whole_step,
)

__all__ = [
    "DecisionRow",
    "FindingRow",
    "Gone",
    "JournalUnwritable",
    "LogLine",
    "MetricError",
    "Note",
    "Points",
    "Recorder",
    "Remainder",
    "Unwritten",
    "connect_by_url",
    "legal_key",
    "real_number",
    "secrets_of",
    "whole_step",
]

EAGER_RECORDS = 1_000  # so many waiting records are written at once, without waiting for `flush_after_s`
MAX_WAITING_POINTS = 100_000  # then `record` waits for the disk: memory stays bounded
DISK_RETRY_AFTER_S = 0.5
DISK_PATIENCE_S = 45.0  # so long a disk may be full before what trials say is refused; `sync` waits longer
CLOSE_WITHOUT_DISK_S = 5.0
CLOSE_GRACE_S = 2.0  # how long after its deadline `close` waits for threads that are being interrupted


class JournalUnwritable(OrchError):
    """The recorder's journal cannot be written, usually because the disk is full."""

    exit_code = 1


@dataclass(frozen=True)
class Unwritten:
    """What a closing recorder could not bring into the database. It lies in the journal for the next recorder."""

    points: int  # metric values, findings, decisions and log lines
    run_ids: tuple[str, ...]
    num_rejected: int = 0  # rows that Postgres will never take; kept in rejected.jsonl
    num_damaged: int = 0  # journal lines that could not be read back
    reason: str = ""

    @property
    def is_empty(self) -> bool:
        """True if everything that was given is in the database."""
        return not (self.points or self.num_rejected or self.num_damaged or self.reason)


@dataclass(frozen=True)
class Gone:
    """A recorder without a last answer, whose journal nobody is known to have brought over whole."""

    host: str
    journal: str  # the path of its folder there
    trials: tuple[int, ...]  # whose words it may have kept to itself

    is_empty: ClassVar[bool] = False


Remainder = Unwritten | Gone  # of one recorder, when all is over


class Recorder:
    """Records reports, findings, decisions and log lines of any number of trials, from any number of threads."""

    def __init__(
        self,
        connect: Callable[[], psycopg.Connection[Any]],
        journal_dir: Path,
        flush_after_s: float = 0.1,
        adopt_orphans: bool = True,
        secrets: Sequence[str] = (),
    ) -> None:
        """Starts recording, and draining what dead recorders of this host left in `journal_dir`.

        No note is kept with one of the `secrets` in its text. Raises JournalUnwritable if the folder cannot be
        written. The database need not be there yet.
        """
        self._secrets = tuple(secrets)
        self._journal_dir, self._adopts_orphans = journal_dir, adopt_orphans
        self._flush_after_s = flush_after_s
        try:
            self._journal = Journal.create(journal_dir)
        except OSError as error:
            raise _unwritable(journal_dir, error) from error
        self._drain = Drain(connect, journal_dir)
        self._orphans = deque(orphans(journal_dir) if adopt_orphans else ())
        self._brought: tuple[str, ...] = ()  # names of journals
        self._flawed: set[str] = set()  # those, and perhaps our own, of which not everything reached the database
        self._state = threading.Condition()  # guards what follows
        self._waiting: deque[Record] = deque()  # given, not yet in the journal
        self._num_waiting_points = 0
        self._num_given = self._num_safe = self._num_stored = 0  # records
        self._num_damaged = 0
        self._hurry = False  # somebody waits for the disk
        self._deadline: float | None = None  # set by `close`: give up then (time.monotonic)
        self._failure: Exception | None = None
        self._disk_error: OSError | None = None
        self._disk_failed_at = 0.0  # the first time since a write succeeded (time.monotonic)
        self._unwritten: Unwritten | None = None
        self._writer = self._started(self._write_journal, "orch-journal")
        self._drainer = self._started(self._drain_journals, "orch-drain")

    # What trials call

    def record(self, points: Sequence[Points]) -> None:
        """Takes the points and returns at once; they are safe about `flush_after_s` later, or after `sync`.

        A disk that is full is waited for, `DISK_PATIENCE_S` long; meanwhile what is given stays in memory.
        Raises MetricError for a value that is no real number, and JournalUnwritable or the error of a recording thread
        if an earlier record could not be kept; nothing of this call is then taken.
        """
        self._take([checked(point, self._secrets) for point in points])

    def notes(self, rows: Sequence[Note]) -> None:
        """Takes findings, decisions and log lines as `record` takes points."""
        self._take([discreet(row, self._secrets) for row in rows])

    def sync(self, timeout_s: float = 60.0) -> None:
        """Returns when everything given so far is safe on disk. Raises TimeoutError, or as `record` does."""
        with self._state:
            target = self._num_given
            if not self._wait(lambda: self._num_safe >= target, timeout_s):
                raise TimeoutError(f"the journal in {self._journal_dir} did not reach the disk within {timeout_s:g} s")

    # What commands call

    def drain(self, timeout_s: float) -> bool:
        """Waits until everything given so far, and what dead recorders left, is in the database; False if it is not.

        Points of runs that MLflow does not have count as dealt with; `close` names them.
        """
        with self._state:
            target = self._num_given
            return self._wait(lambda: self._num_stored >= target and not self._orphans, timeout_s)

    def pending(self) -> int:
        """How many reports, findings and decisions are not in the database yet."""
        with self._state:
            return self._num_given - self._num_stored

    def given_and_safe(self) -> tuple[int, int]:
        """How many records were given so far, and how many of these, the first ones, are on disk."""
        with self._state:
            return self._num_given, self._num_safe

    @property
    def journal(self) -> Path:
        """The folder that keeps what is not in the database yet; no other recorder ever had one of that name."""
        return self._journal.folder

    @property
    def brought(self) -> tuple[str, ...]:
        """The journals of dead recorders that were brought over whole so far: nothing damaged, refused or set aside."""
        return self._brought

    @property
    def is_clear(self) -> bool:
        """True if nothing is lost with this recorder's disk: all that it was given, or has inherited, is stored."""
        with self._state:
            is_stored = self._num_given == self._num_stored and not self._orphans
        return is_stored and not self._flawed

    @property
    def database_error(self) -> str:
        """Why the last try to reach the database failed; empty when it succeeded."""
        return self._drain.error

    @property
    def disk_error(self) -> str:
        """Why the last try to write the journal failed; empty when it succeeded."""
        error = self._disk_error
        return "" if error is None else str(_unwritable(self._journal_dir, error))

    @property
    def unknown_runs(self) -> frozenset[str]:
        """Runs of ours that MLflow does not have: deleted, or of another database. Their points are kept on disk."""
        return frozenset(self._drain.unknown_runs)

    def close(self, timeout_s: float) -> Unwritten:
        """Drains for at most `timeout_s`, then stops. What is left stays on disk for the next recorder.

        Raises as `record` does, after everything that could be saved is saved. A second call returns the same.
        """
        if self._unwritten is None:
            late = orphans(self._journal_dir) if self._adopts_orphans else []  # of recorders that died after we began
            with self._state:
                if self._has_no_disk():  # it has been waited for
                    timeout_s = min(timeout_s, CLOSE_WITHOUT_DISK_S)
                self._orphans.extend(folder for folder in late if folder not in self._orphans)
                self._deadline = time.monotonic() + timeout_s
                self._state.notify_all()
            self._drainer.join(timeout_s)
            self._drain.cancel()
            self._drainer.join(CLOSE_GRACE_S)
            self._writer.join(CLOSE_GRACE_S)
            self._unwritten = self._closed()
        with self._state:
            self._raise_failure()
        return self._unwritten

    # Both threads and every caller

    def _started(self, work: Callable[[], None], name: str) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except Exception as error:  # handed to whoever calls record, sync, drain or close next
                with self._state:
                    self._failure = error
                    self._state.notify_all()

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        return thread

    def _take(self, records: Sequence[Record]) -> None:
        with self._state:
            if self._num_waiting_points >= MAX_WAITING_POINTS:
                self._wait(lambda: self._num_waiting_points < MAX_WAITING_POINTS, None)
            self._raise_failure()
            if self._deadline is not None:
                raise RuntimeError("this recorder is closed")
            was_idle = not self._waiting
            self._waiting.extend(records)
            self._num_waiting_points += num_points(records)
            self._num_given += len(records)
            if was_idle or len(self._waiting) >= EAGER_RECORDS:
                self._state.notify_all()

    def _wait(self, is_done: Callable[[], bool], timeout_s: float | None) -> bool:
        """Waits under the lock until `is_done`; raises when recording has failed meanwhile."""
        self._hurry = True
        self._state.notify_all()
        self._state.wait_for(lambda: is_done() or self._has_failed(), timeout_s)
        self._raise_failure()
        return is_done()

    def _has_failed(self) -> bool:
        return self._failure is not None or self._has_no_disk()

    def _has_no_disk(self) -> bool:
        """True when the journal could not be written for too long, or cannot be while we close."""
        is_patient = self._deadline is None and time.monotonic() - self._disk_failed_at < DISK_PATIENCE_S
        return self._disk_error is not None and not is_patient

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"recording has stopped: {self._failure!r}") from self._failure
        if self._disk_error is not None and self._has_no_disk():
            raise _unwritable(self._journal_dir, self._disk_error, len(self._waiting)) from self._disk_error

    def _is_late(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _pause(self, pause_s: float) -> None:
        """Sleeps, but not beyond the deadline."""
        until = time.monotonic() + pause_s
        with self._state:
            while not self._is_late() and (left_s := until - time.monotonic()) > 0:
                to_deadline_s = left_s if self._deadline is None else self._deadline - time.monotonic()
                self._state.wait(min(left_s, max(to_deadline_s, 0.0)))

    # The journal's thread

    def _write_journal(self) -> None:
        while batch := self._next_batch():
            try:
                self._journal.append([to_json(record) for record in batch])
            except OSError as error:
                self._note_disk_error(error)
                if self._is_late():
                    return
                self._pause(DISK_RETRY_AFTER_S)
                continue
            self._note_safe(batch)

    def _next_batch(self) -> list[Record]:
        """What to write next; waits a little so that one sync serves many reports. Empty when closing and done."""
        with self._state:
            self._state.wait_for(lambda: self._waiting or self._deadline is not None)
            self._state.wait_for(
                lambda: self._hurry or self._deadline is not None or len(self._waiting) >= EAGER_RECORDS,
                self._flush_after_s,
            )
            self._hurry = False
            return list(self._waiting)

    def _note_disk_error(self, error: OSError) -> None:
        with self._state:
            self._disk_failed_at = self._disk_failed_at if self._disk_error else time.monotonic()
            self._disk_error = error
            self._state.notify_all()

    def _note_safe(self, batch: Sequence[Record]) -> None:
        with self._state:
            for _ in batch:
                self._waiting.popleft()
            self._num_waiting_points -= num_points(batch)
            self._num_safe += len(batch)
            self._disk_error = None
            self._state.notify_all()

    # The database's thread

    def _drain_journals(self) -> None:
        """Our own journal first: it is what people look at. Those of the dead when there is nothing else to do."""
        while self._has_work() and not self._is_late():
            if self._num_safe > self._num_stored:
                self._drain_own()
            elif self._orphans:
                self._drain_orphan(self._orphans[0])

    def _has_work(self) -> bool:
        """Waits for work; False when closing and everything is in the database."""
        with self._state:
            while self._num_safe == self._num_stored and not self._orphans:
                if self._deadline is not None and self._num_given == self._num_stored:
                    return False
                if self._is_late():
                    return False
                self._state.wait(None if self._deadline is None else self._deadline - time.monotonic())
            return True

    def _drain_own(self) -> None:
        num_stored = self._drain_once(self._journal, inherited=False)
        with self._state:
            self._num_stored += num_stored
            self._state.notify_all()

    def _drain_orphan(self, folder: Path) -> None:
        journal = Journal.adopt(folder)
        if journal is not None:
            while journal.backlog_bytes and self._num_safe == self._num_stored and not self._is_late():
                self._drain_once(journal, inherited=True)
            is_unfinished = journal.backlog_bytes > 0
            self._num_damaged += journal.num_damaged
            journal.close()
            if is_unfinished:
                return
            if folder.name not in self._flawed:
                self._brought += (folder.name,)
        with self._state:
            self._orphans.popleft()
            self._state.notify_all()

    def _drain_once(self, journal: Journal, inherited: bool) -> int:
        """Moves one batch into the database. Returns how many records it held: 0 after a failed try and its pause."""
        records = [from_json(fields) for fields in journal.read()]
        try:
            is_whole = self._drain.store(records, inherited)
        except Unavailable as error:
            journal.rewind()
            self._pause(self._drain.failed(error))
            return 0
        journal.mark_stored()
        if not is_whole or journal.num_damaged:
            self._flawed.add(journal.folder.name)
        return len(records)

    # The end

    def _closed(self) -> Unwritten:
        """Counts what is left. A thread that hangs on a disk or a network keeps its files until the process ends."""
        own = [self._journal, *(journal for inherited, journal in self._drain.set_aside.items() if not inherited)]
        left = Left()
        for journal in own:
            left.add(from_json(fields) for fields in journal.remaining())
        with self._state:
            left.add(self._waiting)
        num_damaged = self._num_damaged + self._journal.num_damaged
        if not self._writer.is_alive() and not self._drainer.is_alive():
            self._drain.close()
            for journal in {id(journal): journal for journal in (*own, *self._drain.set_aside.values())}.values():
                journal.close()
        reason = self._drain.error or ("MLflow does not have these runs" if self._drain.unknown_runs else "")
        return Unwritten(left.num_points, tuple(sorted(left.run_ids)), self._drain.num_rejected, num_damaged, reason)


class Left:
    """Counts records without keeping them."""

    def __init__(self) -> None:
        self.num_points = 0
        self.run_ids: set[str] = set()

    def add(self, records: Iterable[Record]) -> None:
        for record in records:
            self.num_points += num_points([record])
            if isinstance(record, Points):
                self.run_ids.add(record.run_id)


def _unwritable(journal_dir: Path, error: OSError, num_waiting: int = 0) -> JournalUnwritable:
    held = f"; {num_waiting} reports wait in memory" if num_waiting else ""
    return JournalUnwritable(
        f"cannot write the journal in {journal_dir}: {error.strerror or error}{held}\n"
        "make space there, or set ORCH_JOURNAL_DIR to a folder on another disk"
    )
