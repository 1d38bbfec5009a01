"""Reads and writes the ledger: every method is one short transaction, mostly one round trip. Decides nothing.

An attempt's number is the fencing token: whoever finishes an attempt that another has replaced changes nothing.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import psycopg
from sqlalchemy import Engine, RowMapping, select, text
from sqlalchemy.dialects.postgresql import insert as upsert

from orchestrator.errors import AlreadyExists, NotFound
from orchestrator.ledger.models import FindingRow, Sweep, SweepState, Trial
from orchestrator.ledger.rows import AttemptRow, FoundRow, SweepRow, TrialRow, restore_floats, sweep_row
from orchestrator.ledger.statements import (
    ADD_TRIALS,
    ATTEMPT_COLUMNS,
    BEGIN_ATTEMPT,
    BUSY_SECONDS,
    CLAIM,
    COUNT_MESSAGES,
    DECISIONS,
    FINDINGS_AFTER,
    FINISH,
    HOLDER,
    MARK,
    RELEASE,
    REQUEUE,
    SET_SWEEP_STATE,
)
from orchestrator.trial import (
    Action,
    Candidate,
    Decision,
    Finding,
    Outcome,
    Severity,
    TrialState,
    canonical_json,
    jsonable,
)

UNFINISHED = (TrialState.KILLED, TrialState.RUNNING, TrialState.LOST)
LOCK_CLASS = 0x6F726368  # "orch": the first half of a sweep's advisory lock; the second is its id
APPLICATION_NAME_BYTES = 63  # PostgreSQL cuts longer ones


class Hold:
    """A sweep's driver's proof that it is the only one: a session-level advisory lock on a connection of its own.

    Lost when its connection is.
    """

    def __init__(self, ledger: Ledger, sweep_id: int) -> None:
        self._ledger, self._sweep_id = ledger, sweep_id
        self._pool = ledger.engine.pool.recreate()  # same settings and events, no shared connections
        self._link: Any = None

    def still_held(self) -> bool:
        """False after the database restarted or cut the connection: another command may drive the sweep by now."""
        if self._link is None:
            return False
        try:
            self._link.driver_connection.execute("select 1")
        except (psycopg.OperationalError, psycopg.InterfaceError):
            return False
        return True

    def renew(self) -> None:
        """Takes the sweep again if the connection was lost. Raises AlreadyExists if somebody else was faster."""
        if not self.still_held():
            self.release()
            self.take(again=True)

    def take(self, again: bool = False) -> None:
        self._link = self._pool.connect()
        try:
            connection = self._link.driver_connection
            connection.autocommit = True
            connection.execute("select set_config('application_name', %s, false)", (_driver_name(),))
            self._ledger._take(connection, self._sweep_id, again)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.invalidate()  # closes it, which frees the lock


class Ledger:
    """The ledger of one database. Safe to share between threads as far as the pool of its `engine` has connections."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._single = engine.execution_options(isolation_level="AUTOCOMMIT")  # one statement, one round trip
        self._columns: dict[int, dict[str, str]] = {}

    # Sweeps

    def find_sweep(self, name: str) -> SweepRow | None:
        return self._sweep_where(Sweep.name == name)

    def sweep(self, sweep_id: int) -> SweepRow:
        """Raises NotFound after a purge."""
        row = self._sweep_where(Sweep.id == sweep_id)
        if row is None:
            raise NotFound(f"there is no sweep with id {sweep_id}")
        return row

    def sweep_names(self) -> list[str]:
        """The names in use, in alphabetical order; archived sweeps are left out."""
        with self._single.connect() as connection:
            query = select(Sweep.name).where(Sweep.archived_at.is_(None)).order_by(Sweep.name)
            return list(connection.scalars(query))

    def create_sweep(
        self,
        *,
        name: str,
        workload: str,
        spec: Mapping[str, Any],
        metric: str,
        mode: str,
        columns: Mapping[str, str],
        description: str = "",
        source: str = "",
        experiment_id: str | None = None,
        tags: Mapping[str, str] | None = None,
        findings: Sequence[Finding] = (),
    ) -> SweepRow:
        """A new sweep in state `created`, together with what its preflight found.

        `columns` maps each field of the Config to its SQL type, see `view_catalog`. Raises AlreadyExists when the name
        is taken.
        """
        values = {
            "name": name,
            "workload": workload,
            "spec": jsonable(spec),
            "metric": metric,
            "mode": mode,
            "columns": [[field, sql_type] for field, sql_type in columns.items()],
            "description": description,
            "source": source,
            "experiment_id": experiment_id,
            "tags": dict(tags or {}),
        }
        query = upsert(Sweep).values(values).on_conflict_do_nothing().returning(Sweep.__table__)
        with self.engine.begin() as connection:
            row = connection.execute(query).mappings().one_or_none()
            if row is None:
                raise AlreadyExists(f"there is a sweep called {name} already")
            if findings:
                connection.execute(_adding(row["id"], [(None, None, finding) for finding in findings]))
        return sweep_row(row)

    def set_sweep_state(self, sweep_id: int, state: SweepState) -> None:
        """Also keeps `started_at` (the first start) and `ended_at` (the last end; null while it runs)."""
        self._one(SET_SWEEP_STATE, sweep_id=sweep_id, state=state.value)

    def archive(self, sweep_id: int) -> str:
        """Frees the sweep's name and takes it out of all views; returns its new name, `<name>~<id>`."""
        statement = text(
            """
            update orch_ledger.sweeps set name = name || '~' || id, archived_at = clock_timestamp()
            where id = :sweep_id and archived_at is null
            returning name
            """
        )
        return str(self._one(statement, sweep_id=sweep_id)["name"])

    def purge(self, sweep_id: int) -> None:
        """Deletes the sweep with its trials, attempts and findings. MLflow's rows are not touched."""
        self._one(text("delete from orch_ledger.sweeps where id = :sweep_id returning id"), sweep_id=sweep_id)
        self._columns.pop(sweep_id, None)

    # Trials

    def add_trials(self, sweep_id: int, items: Sequence[tuple[Candidate, Mapping[str, Any], str]]) -> list[TrialRow]:
        """Adds (candidate, resolved config by dotted name, config hash); returns the rows made, by number.

        A hash the sweep has already is left as it is; the numbers of new trials go on after the last one.
        """
        values = [
            {
                "params": candidate.params,
                "config": config,
                "config_hash": digest,
                "cell": candidate.cell,
                "sample": candidate.sample,
            }
            for candidate, config, digest in items
        ]
        with self.engine.begin() as connection:
            # Two extensions of one sweep would give the same numbers; the second waits here.
            connection.execute(select(Sweep.id).where(Sweep.id == sweep_id).with_for_update())
            rows = connection.execute(ADD_TRIALS, {"sweep_id": sweep_id, "items": canonical_json(values)})
            made = rows.mappings().all()
        return sorted(self._trial_rows(made), key=lambda trial: trial.number)

    def trials(self, sweep_id: int) -> list[TrialRow]:
        """All trials of a sweep, by number."""
        with self._single.connect() as connection:
            query = select(Trial.__table__).where(Trial.sweep_id == sweep_id).order_by(Trial.number)
            rows = connection.execute(query).mappings().all()
        return self._trial_rows(rows)

    def counts(self, sweep_id: int) -> dict[TrialState, int]:
        """How many trials are in each state; states without a trial count 0."""
        statement = text("select state, count(*) from orch_ledger.trials where sweep_id = :sweep_id group by state")
        with self._single.connect() as connection:
            found = {state: count for state, count in connection.execute(statement, {"sweep_id": sweep_id})}
        return {state: found.get(state.value, 0) for state in TrialState}

    def claim(self, sweep_id: int) -> TrialRow | None:
        """The waiting trial with the lowest number, now running; None when none waits. No trial is given out twice."""
        return next(iter(self._trials_of(CLAIM, sweep_id=sweep_id)), None)

    def set_run(self, trial_id: int, run_id: str) -> None:
        """Remembers MLflow's run of a trial, before it trains."""
        self._one(
            text("update orch_ledger.trials set run_id = :run_id where id = :trial_id returning id"),
            trial_id=trial_id,
            run_id=run_id,
        )

    def begin_attempt(
        self,
        trial_id: int,
        host: str,
        *,
        first_step: int = 0,
        not_before: datetime | None = None,
        pid: int | None = None,
        git_commit: str = "",
    ) -> AttemptRow:
        """The next try at a trial. From `first_step` on it hides what earlier attempts measured.

        `not_before`: when the last point of an earlier attempt was measured, for hosts whose clocks differ.
        Raises NotFound when the trial is gone.
        """
        row = self._one(
            BEGIN_ATTEMPT,
            trial_id=trial_id,
            host=host,
            first_step=first_step,
            not_before=not_before,
            pid=pid,
            git_commit=git_commit,
        )
        return AttemptRow(**{**row, "state": TrialState(row["state"])})

    def finish(self, trial_id: int, attempt: int, outcome: Outcome, *, host: str = "", device: str = "") -> bool:
        """Records how the attempt and with it the trial ended. False, and no change, when a later one replaced it."""
        assert outcome.state.is_over
        return self._changes(FINISH, **_outcome_values(trial_id, attempt, outcome), host=host, device=device)

    def requeue(self, trial_id: int, attempt: int, outcome: Outcome) -> bool:
        """Records how the attempt ended and lets the trial wait for another. False when a later one replaced it.

        An attempt that ended `waiting` was interrupted on purpose: the trial keeps what it has reported so far.
        """
        assert outcome.state is not TrialState.RUNNING
        values = _outcome_values(trial_id, attempt, outcome)
        del values["diverged_at"]
        return self._changes(REQUEUE, **values)

    def release_unfinished(
        self, sweep_id: int, *, also: Collection[TrialState] = (), numbers: Collection[int] = ()
    ) -> list[TrialRow]:
        """Lets killed, running and lost trials wait again, `also` those in other states or with these `numbers`.

        Only for the sweep's holder: what runs belongs to a command that is gone. Returns the released trials.
        """
        states = [state.value for state in (*UNFINISHED, *also)]
        return self._trials_of(RELEASE, sweep_id=sweep_id, states=states, numbers=list(numbers))

    def abandon(self, sweep_id: int, reason: str) -> None:
        """Marks what runs as killed and the sweep as interrupted: its command ends before its time."""
        with self.engine.begin() as connection:
            values = {"sweep_id": sweep_id, "states": ["running"], "state": "killed", "reason": reason}
            connection.execute(MARK, values)
            connection.execute(SET_SWEEP_STATE, {"sweep_id": sweep_id, "state": SweepState.INTERRUPTED.value})

    def attempts(self, trial_id: int) -> list[AttemptRow]:
        """All tries at a trial, by number."""
        statement = text(
            f"select {ATTEMPT_COLUMNS} from orch_ledger.attempts where trial_id = :trial_id order by number"
        )
        with self._single.connect() as connection:
            rows = connection.execute(statement, {"trial_id": trial_id}).mappings().all()
        return [AttemptRow(**{**row, "state": TrialState(row["state"])}) for row in rows]

    def add_findings(self, sweep_id: int, items: Sequence[tuple[int | None, int | None, Finding]]) -> int:
        """Adds (trial id, attempt, finding); no trial for preflight. Returns how many were new: a replay adds none."""
        if not items:
            return 0
        with self._single.connect() as connection:
            return len(connection.execute(_adding(sweep_id, items)).all())

    def newest_finding(self) -> int:
        """The id of the finding that was stored last, of whatever sweep; 0 without any."""
        with self._single.connect() as connection:
            return int(connection.scalar(text("select coalesce(max(id), 0) from orch_ledger.findings")) or 0)

    def findings_after(self, sweep_id: int, finding_id: int) -> list[FoundRow]:
        """The findings about trials that have a greater id, by id."""
        with self._single.connect() as connection:
            values = {"sweep_id": sweep_id, "finding_id": finding_id}
            rows = connection.execute(FINDINGS_AFTER, values).mappings().all()
        return [_found_row(row) for row in rows]

    def decisions(self, sweep_id: int) -> list[Decision]:
        """What was decided about the trials of a sweep, in the order in which it was stored."""
        with self._single.connect() as connection:
            rows = connection.execute(DECISIONS, {"sweep_id": sweep_id}).mappings().all()
        types = self._columns_of(sweep_id) if rows else {}
        return [
            Decision(**{**row, "action": Action(row["action"]), "params": restore_floats(row["params"], types)})
            for row in rows
        ]

    def busy_seconds(self, sweep_id: int) -> float:
        """How long at least one trial of the sweep was being trained, by whatever command. Reads MLflow's points."""
        with self._single.connect() as connection:
            return float(connection.scalar(BUSY_SECONDS, {"sweep_id": sweep_id}) or 0.0)

    def restate(
        self,
        sweep_id: int,
        moved: Sequence[tuple[int, Candidate, str]],
        *,
        spec: Mapping[str, Any],
        source: str,
        description: str,
        reopened: bool,
    ) -> None:
        """Replaces what a sweep's file says, and gives trials (id, candidate, config hash) their places in it.

        `reopened`: the file asks for more trials, so that the sweep is not finished, whatever happens to this command.

        One statement: nobody sees the trials of one file beside the words of the other.
        """
        items = [
            {
                "id": trial_id,
                "params": candidate.params,
                "cell": candidate.cell,
                "sample": candidate.sample,
                "config_hash": digest,
            }
            for trial_id, candidate, digest in moved
        ]
        statement = text(
            """
            with said as (
                update orch_ledger.sweeps
                set spec = cast(:spec as jsonb), source = :source, description = :description,
                    state = case when :reopened then 'interrupted' else state end
                where id = :sweep_id
            )
            update orch_ledger.trials as trial
            set params = item.params, cell = item.cell, sample = item.sample, config_hash = item.config_hash
            from jsonb_to_recordset(cast(:items as jsonb))
                as item (id bigint, params jsonb, cell jsonb, sample integer, config_hash text)
            where trial.id = item.id and trial.sweep_id = :sweep_id
            """
        )
        said = {"spec": canonical_json(spec), "source": source, "description": description, "reopened": reopened}
        with self._single.connect() as connection:
            connection.execute(statement, {"sweep_id": sweep_id, "items": canonical_json(items), **said})

    def count_messages(self, sweep_id: int, check_name: str) -> dict[str, int]:
        """What a check said of finished trials in their last attempt, and of how many."""
        with self._single.connect() as connection:
            rows = connection.execute(COUNT_MESSAGES, {"sweep_id": sweep_id, "check_name": check_name})
            return {message: count for message, count in rows}

    @contextmanager
    def hold(self, sweep_id: int) -> Iterator[Hold]:
        """Makes this command the sweep's only driver until the block ends or the process dies.

        Raises AlreadyExists naming the holder: process, host and since when.
        """
        hold = Hold(self, sweep_id)
        hold.take()
        try:
            yield hold
        finally:
            hold.release()

    # Plumbing

    def _take(self, connection: Any, sweep_id: int, again: bool) -> None:
        key = sweep_id % 2**31
        for _ in range(20):
            if connection.execute("select pg_try_advisory_lock(%s::int, %s::int)", (LOCK_CLASS, key)).fetchone()[0]:
                return
            with self._single.connect() as other:
                holder = other.execute(HOLDER, {"class": LOCK_CLASS, "object": key}).one_or_none()
            if again and holder is not None and holder[0] == _driver_name():
                return  # a cut connection of ours that the server still believes in: nobody else has the sweep
            if holder is not None:
                who = (holder[0] or "another session").removeprefix("orch sweep ")
                since = f" since {holder[1].astimezone():%Y-%m-%d %H:%M:%S %Z}" if holder[1] else ""
                raise AlreadyExists(f"this sweep is being run by {who}{since}")
            time.sleep(0.05)  # it was freed between the two questions
        raise AlreadyExists("this sweep is being run by another command, which comes and goes; try again")

    def _sweep_where(self, condition: Any) -> SweepRow | None:
        with self._single.connect() as connection:
            row = connection.execute(select(Sweep.__table__).where(condition)).mappings().one_or_none()
        return None if row is None else sweep_row(row)

    def _one(self, statement: Any, **values: Any) -> RowMapping:
        with self._single.connect() as connection:
            row = connection.execute(statement, values).mappings().one_or_none()
        if row is None:
            raise NotFound("the sweep or trial is gone: it was removed while this command worked on it")
        return row

    def _changes(self, statement: Any, **values: Any) -> bool:
        with self._single.connect() as connection:
            return connection.execute(statement, values).first() is not None

    def _trials_of(self, statement: Any, **values: Any) -> list[TrialRow]:
        with self._single.connect() as connection:
            rows = connection.execute(statement, values).mappings().all()
        return self._trial_rows(rows)

    def _trial_rows(self, rows: Sequence[RowMapping]) -> list[TrialRow]:
        if not rows:
            return []
        types = self._columns_of(rows[0]["sweep_id"])
        return [
            TrialRow(
                **{
                    **row,
                    "state": TrialState(row["state"]),
                    "params": restore_floats(row["params"], types),
                    "config": restore_floats(row["config"], types),
                    "cell": restore_floats(row["cell"], types),
                }
            )
            for row in rows
        ]

    def _columns_of(self, sweep_id: int) -> dict[str, str]:
        if sweep_id not in self._columns:
            with self._single.connect() as connection:
                found = connection.scalar(select(Sweep.columns).where(Sweep.id == sweep_id))
            self._columns[sweep_id] = {field: sql_type for field, sql_type in found or ()}
        return self._columns[sweep_id]


def _adding(sweep_id: int, items: Sequence[tuple[int | None, int | None, Finding]]) -> Any:
    """The statement that adds findings and returns the ids of those that are new."""
    values = [
        {
            "sweep_id": sweep_id,
            "trial_id": trial_id,
            "attempt": attempt,
            "check_name": finding.check_name,
            "severity": finding.severity.value,
            "step": finding.step,
            "value": finding.value,
            "threshold": finding.threshold,
            "message": finding.message,
            "advice": finding.advice,
        }
        for trial_id, attempt, finding in items
    ]
    return upsert(FindingRow).values(values).on_conflict_do_nothing().returning(FindingRow.id)


def _outcome_values(trial_id: int, attempt: int, outcome: Outcome) -> dict[str, Any]:
    return {
        "trial_id": trial_id,
        "attempt": attempt,
        "state": outcome.state.value,
        "objective": outcome.objective,
        "more_objectives": list(outcome.more_objectives),
        "last_step": outcome.last_step,
        "diverged_at": outcome.diverged_at,
        "reason": outcome.reason,
        "error": outcome.error,
        "failure": outcome.failure.value,
        "seconds": outcome.seconds,
        "worker_host": outcome.host,
    }


def _found_row(row: RowMapping) -> FoundRow:
    told = {name: value for name, value in row.items() if name not in ("id", "number")}
    return FoundRow(row["id"], row["number"], Finding(**{**told, "severity": Severity(row["severity"])}))


def _driver_name() -> str:
    """`orch sweep <pid>@<host>`: what others see of a sweep's holder in pg_stat_activity."""
    name = f"orch sweep {os.getpid()}@{socket.gethostname()}"
    return name.encode()[:APPLICATION_NAME_BYTES].decode(errors="ignore")
