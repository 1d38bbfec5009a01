"""The lease of a sweep: one command drives it, others see who and since when. Decides nothing about trials.

The lease is a row's columns, not a connection: it outlives a restart of the database and a network that is away. Who
takes it raises `fence`; what a former holder still writes carries the old one and changes nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, exc, text

from orchestrator.errors import AlreadyExists, NotFound
from orchestrator.ledger.models import SweepState, Wish
from orchestrator.ledger.process import is_gone, process_name, this_process
from orchestrator.trial import TrialState

BEAT_S = 2.0  # also how long a wish to cancel waits
DOUBTFUL_AFTER_S = 10.0  # a live holder speaks more often
STALE_AFTER_S = 60.0
RELEASE_WAIT_S = 5.0
AWAY = (
    *(psycopg.OperationalError, psycopg.InterfaceError, OSError),
    *(exc.OperationalError, exc.InterfaceError, exc.TimeoutError),
)
IDLE_TIMEOUT_MS = 30_000  # a transaction of a suspended holder is gone before anybody may take its sweep

Marker = Callable[[psycopg.Connection[Any], Sequence[str], str, str], None]
"""Brings MLflow's runs in line: (connection, run ids, TrialState, reason), in the caller's transaction."""

# The database's own clock, and without the time in which the database was away itself.
HOLDER_COLUMNS = """
    id, name, holder, holder_process, fence, heartbeat_at, wanted,
    case when heartbeat_at is not null then
        extract(epoch from clock_timestamp() - greatest(heartbeat_at, pg_postmaster_start_time()))::double precision
    end
"""

LOOK = f"select {HOLDER_COLUMNS} from orch_ledger.sweeps where id = %s"

# A holder without a heartbeat has been dealt with; nobody took its place yet.
HELD = f"select {HOLDER_COLUMNS} from orch_ledger.sweeps where holder <> '' and heartbeat_at is not null"

TAKE = """
    update orch_ledger.sweeps
    set holder = %(holder)s, holder_process = %(process)s, heartbeat_at = clock_timestamp(), fence = fence + 1,
        wanted = ''
    where id = %(sweep_id)s and fence = %(seen_fence)s and holder = %(seen_holder)s
        and heartbeat_at is not distinct from %(seen_heartbeat)s
    returning fence
"""

RENEW = """
    with before as (
        select id, heartbeat_at from orch_ledger.sweeps where id = %(sweep_id)s and fence = %(fence)s for no key update
    )
    update orch_ledger.sweeps as sweep
    set heartbeat_at = clock_timestamp()
    from before
    where sweep.id = before.id
    returning sweep.wanted, before.heartbeat_at is null
"""

RELEASE = """
    update orch_ledger.sweeps set holder = '', holder_process = '', heartbeat_at = null, wanted = ''
    where id = %(sweep_id)s and fence = %(fence)s
"""

# What runs ends as `state`, at the holder's last word or now, and its sweep as `sweep_state`.
STRIKE = """
    with struck as (
        update orch_ledger.sweeps
        set state = case when state in ('created', 'running') then %(sweep_state)s else state end,
            ended_at = coalesce(ended_at, %(at)s::timestamptz, clock_timestamp()),
            heartbeat_at = case when %(at)s::timestamptz is null then heartbeat_at end
        where id = %(sweep_id)s and fence = %(fence)s and holder <> ''
            and (%(at)s::timestamptz is null or heartbeat_at = %(at)s)
        returning id
    ),
    marked as (
        update orch_ledger.trials as trial
        set state = %(state)s, reason = %(reason)s,
            ended_at = greatest(trial.started_at, coalesce(%(at)s::timestamptz, clock_timestamp()))
        from struck
        where trial.sweep_id = struck.id and trial.state = 'running'
        returning trial.id, trial.run_id
    ),
    closed as (
        update orch_ledger.attempts as attempt
        set state = %(state)s,
            ended_at = greatest(attempt.started_at, coalesce(%(at)s::timestamptz, clock_timestamp()))
        from marked
        where attempt.trial_id = marked.id and attempt.ended_at is null
    )
    select run_id from marked where run_id is not null order by run_id
"""

# A holder's trials are `lost` only by a strike: it lets earlier ones wait before it begins.
REVIVE = """
    with back as (
        update orch_ledger.trials set state = 'running', reason = '', ended_at = null
        where sweep_id = %(sweep_id)s and state = 'lost'
        returning id, attempts, run_id
    ),
    opened as (
        update orch_ledger.attempts as attempt set state = 'running', ended_at = null
        from back
        where attempt.trial_id = back.id and attempt.number = back.attempts and attempt.state = 'lost'
    ),
    swept as (
        update orch_ledger.sweeps set state = 'running', ended_at = null
        where id = %(sweep_id)s and state = 'interrupted'
    )
    select run_id from back where run_id is not null order by run_id
"""

GUARD = text(
    """
    select set_config('idle_in_transaction_session_timeout', :timeout_ms, true)
    from orch_ledger.sweeps where id = :sweep_id and fence = :fence
    for share
    """
)


@dataclass(frozen=True)
class Holder:
    """Who drives a sweep, as far as the database knows."""

    sweep_id: int
    sweep: str
    name: str  # `<pid>@<host>`; empty: nobody
    process: str
    fence: int
    heartbeat_at: datetime | None  # null: the reaper has marked what it left
    wanted: Wish
    silent_s: float | None  # since its last word, by the database's clock

    @property
    def is_gone(self) -> bool:
        """True for a process of this machine that is no more: nobody has to wait for it."""
        return bool(self.name) and is_gone(self.process)

    @property
    def is_stale(self) -> bool:
        """True for one that is dead, or has been silent for so long that it counts as dead."""
        return self.silent_s is None or self.silent_s > STALE_AFTER_S or self.is_gone

    @property
    def is_free(self) -> bool:
        """True when anybody may take the sweep."""
        return not self.name or self.is_stale

    @property
    def why_lost(self) -> str:
        assert self.heartbeat_at is not None
        last_word = f"{self.heartbeat_at.astimezone():%Y-%m-%d %H:%M:%S %Z}"
        if self.is_gone:
            return f"its command {self.name} died (last heard of {last_word})"
        return f"its command {self.name} has been silent since {last_word}"

    def refusal(self) -> str:
        """For whoever wants to drive the sweep as well."""
        silent_s = max(0.0, self.silent_s or 0.0)
        lines = [f"this sweep is being run by {self.name}, last heard of {silent_s:.0f} s ago: {self.sweep}"]
        if silent_s > DOUBTFUL_AFTER_S:
            lines.append(f"  if that command is dead, the sweep is free in {max(0.0, STALE_AFTER_S - silent_s):.0f} s")
        lines += [f"  orch status {self.sweep:<30}  see how far it is", f"  orch cancel {self.sweep:<30}  stop it"]
        return "\n".join(lines)


def holder_of(row: Sequence[Any] | None) -> Holder:
    """From a row of HOLDER_COLUMNS."""
    if row is None:
        raise NotFound("the sweep is gone: it was removed while this command worked on it")
    sweep_id, sweep, name, process, fence, heartbeat_at, wanted, silent_s = row
    return Holder(sweep_id, sweep, name, process, fence, heartbeat_at, Wish(wanted), silent_s)


def look(connection: psycopg.Connection[Any], sweep_id: int) -> Holder:
    """Raises NotFound after a purge."""
    return holder_of(connection.execute(LOOK, (sweep_id,)).fetchone())


def holders(connection: psycopg.Connection[Any]) -> list[Holder]:
    """Who drives a sweep, or did and was not marked as dead yet."""
    return [holder_of(row) for row in connection.execute(HELD)]


def reap(connection: psycopg.Connection[Any], mark_runs: Marker) -> list[Holder]:
    """Marks what dead commands left running as lost, and returns these commands. One look when there are none.

    A database that takes no writes at the moment, or a row that is in use, is left to the next command.
    """
    reaped = []
    for holder in holders(connection):
        if holder.is_stale:
            with contextlib.suppress(psycopg.OperationalError, psycopg.errors.ReadOnlySqlTransaction):
                with connection.transaction():
                    connection.execute("set local lock_timeout = '2s'")
                    reason = holder.why_lost
                    strike(connection, holder, TrialState.LOST, SweepState.INTERRUPTED, reason, mark_runs)
                reaped.append(holder)
    return reaped


def strike(
    connection: psycopg.Connection[Any],
    holder: Holder,
    state: TrialState,
    sweep_state: SweepState,
    reason: str,
    mark_runs: Marker,
) -> None:
    """Marks what the holder has running, here and in MLflow; nothing if it has spoken since. Commits nothing."""
    values = {
        "sweep_id": holder.sweep_id,
        "fence": holder.fence,
        "state": state.value,
        "sweep_state": sweep_state.value,
        "reason": reason,
        "at": holder.heartbeat_at,
    }
    run_ids = [run_id for (run_id,) in connection.execute(STRIKE, values)]
    mark_runs(connection, run_ids, state.value, reason)


def no_runs(connection: psycopg.Connection[Any], run_ids: Sequence[str], state: str, reason: str) -> None:
    """For a database whose trials have no runs in MLflow."""


class Lease:
    """A driver's proof that it is the only one, renewed by a thread.

    The thread shares the pool of `engine` with the driver and keeps no connection between two beats: it can wait for
    what the driver asks meanwhile, since nobody may take the sweep before STALE_AFTER_S.
    """

    def __init__(self, engine: Engine, sweep_id: int, mark_runs: Marker = no_runs) -> None:
        self.sweep_id, self.fence = sweep_id, -1
        self.wanted = Wish.NONE
        self.trouble = ""  # why the last beat did not reach the database
        self.cancel_now: Callable[[], None] = lambda: None  # called by the thread when the wish is not to wait
        self._engine, self._mark_runs = engine, mark_runs
        self._lost_to: Exception | None = None
        self._one_at_a_time = threading.RLock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="orch-lease", daemon=True)

    def take(self) -> None:
        """Raises AlreadyExists naming the holder, or NotFound after a purge."""
        with self._transaction() as connection:
            while (fence := self._taken(connection)) is None:  # somebody else was faster: who?
                connection.commit()
        self.fence = fence
        self._thread.start()

    def _taken(self, connection: psycopg.Connection[Any]) -> int | None:
        seen = look(connection, self.sweep_id)
        if not seen.is_free:
            raise AlreadyExists(seen.refusal())
        values = {
            "sweep_id": self.sweep_id,
            "holder": process_name(),
            "process": this_process(),
            "seen_fence": seen.fence,
            "seen_holder": seen.name,
            "seen_heartbeat": seen.heartbeat_at,
        }
        row = connection.execute(TAKE, values).fetchone()
        return None if row is None else int(row[0])

    def check(self) -> None:
        """Raises AlreadyExists if another command has taken the sweep, or NotFound if it was removed, as of the last
        beat. Asks nobody.
        """
        if self._lost_to is not None:
            raise self._lost_to

    def renew(self) -> None:
        """Says that this command lives, hears what is wanted of it, and takes back what a reaper marked meanwhile.

        Raises as `check`, or the driver's errors when the database is away.
        """
        with self._one_at_a_time:
            self.check()
            if self._ended.is_set():
                return
            values = {"sweep_id": self.sweep_id, "fence": self.fence}
            with self._transaction() as connection:
                row = connection.execute(RENEW, values).fetchone()
                if row is not None and row[1]:
                    run_ids = [run_id for (run_id,) in connection.execute(REVIVE, values)]
                    self._mark_runs(connection, run_ids, TrialState.RUNNING.value, "")
            if row is None:
                self._lost_to = self.why_not_ours()
                raise self._lost_to
            self.wanted = Wish(row[0])

    def guard(self, connection: Connection) -> None:
        """Makes sure, until the transaction ends, that nobody takes the sweep. Raises AlreadyExists if somebody has."""
        values = {"sweep_id": self.sweep_id, "fence": self.fence, "timeout_ms": str(IDLE_TIMEOUT_MS)}
        if connection.execute(GUARD, values).first() is None:
            raise self.why_not_ours()

    def why_not_ours(self) -> AlreadyExists | NotFound:
        """Why a write under this lease found nothing to change. Not for whoever has a connection of the pool."""
        try:
            with self._transaction() as connection:
                holder = look(connection, self.sweep_id)
        except NotFound as error:
            return error
        if holder.fence == self.fence:
            return NotFound("the trial is gone: it was removed while this command worked on it")
        who = f"is being run by {holder.name}" if holder.name else "was taken by another command, which has ended"
        return AlreadyExists(f"this sweep {who}: this command was silent for too long and has lost it")

    def strike(self, state: TrialState, sweep_state: SweepState, reason: str) -> None:
        """Marks what runs as `state`, here and in MLflow: this command ends before its time."""
        ours = Holder(self.sweep_id, "", "", "", self.fence, None, Wish.NONE, None)
        with self._one_at_a_time, self._transaction() as connection:
            strike(connection, ours, state, sweep_state, reason, self._mark_runs)

    def release(self) -> None:
        """Lets others drive the sweep. Where the database is away they see it by this process's end."""
        self._ended.set()
        if self._one_at_a_time.acquire(timeout=RELEASE_WAIT_S):
            try:
                if self.fence >= 0:
                    with contextlib.suppress(*AWAY), self._transaction() as connection:
                        connection.execute(RELEASE, {"sweep_id": self.sweep_id, "fence": self.fence})
            finally:
                self._one_at_a_time.release()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                self.renew()
                if self.wanted is Wish.CANCEL_NOW:
                    self.cancel_now()
            except (AlreadyExists, NotFound):
                return  # `check` raises it where it is heard
            except exc.TimeoutError:
                pass  # whoever waits for an answer on our only connection tells what the matter is
            except Exception as error:  # away, or worse: without another beat the sweep would be taken from us
                self.trouble = (str(getattr(error, "orig", error)).strip() or repr(error)).split("\n")[0]
            else:
                self.trouble = ""

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[psycopg.Connection[Any]]:
        with self._engine.begin() as connection:
            link: Any = connection.connection.driver_connection
            yield link
