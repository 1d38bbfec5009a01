"""Reads and writes the ledger: every method is one short transaction, mostly one round trip. Decides nothing.

Two fencing tokens: a driver's writes carry the fence of its lease and change nothing once another command has taken the
sweep; whoever finishes an attempt that another has replaced changes nothing either.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from sqlalchemy import Engine, RowMapping, select, text
from sqlalchemy.dialects.postgresql import insert as upsert

from orchestrator.errors import AlreadyExists, NotFound
from orchestrator.ledger.lease import IDLE_TIMEOUT_MS, LOOK, Holder, Lease, Marker, holder_of, no_runs
from orchestrator.ledger.models import FindingRow, Sweep, SweepState, Trial, Wish
from orchestrator.ledger.rows import AttemptRow, FoundRow, SweepRow, TrialRow, restore_floats, sweep_row
from orchestrator.ledger.statements import (
    ADD_TRIALS,
    ASK_TO_CANCEL,
    ATTEMPT_COLUMNS,
    BEGIN_ATTEMPT,
    BUSY_SECONDS,
    CLAIM,
    COUNT_MESSAGES,
    DECISIONS,
    FINDINGS_AFTER,
    FINISH,
    LET_WAIT,
    LOCK_SWEEP,
    REQUEUE,
    RESTATE,
    SET_RUN,
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

CUT_SHORT = [state.value for state in TrialState if state.is_unfinished and state is not TrialState.WAITING]


class Ledger:
    """The ledger of one database. Safe to share between threads as far as the pool of its `engine` has connections.

    With a `lease` it is a driver's: its writes raise AlreadyExists, and change nothing, when another has the sweep.
    """

    def __init__(self, engine: Engine, lease: Lease | None = None) -> None:
        self.engine, self._lease = engine, lease
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
            lock = {"sweep_id": sweep_id, "fence": self._fence, "timeout_ms": str(IDLE_TIMEOUT_MS)}
            is_ours = connection.execute(LOCK_SWEEP, lock).first() is not None
            if is_ours:
                rows = connection.execute(ADD_TRIALS, {"sweep_id": sweep_id, "items": canonical_json(values)})
                made = rows.mappings().all()
        if not is_ours:
            raise self._gone()
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
        self._one(SET_RUN, trial_id=trial_id, run_id=run_id)

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

    def requeue(self, trial_id: int, attempt: int, outcome: Outcome, *, alone: bool = False) -> bool:
        """Records how the attempt ended and lets the trial wait for another. False when a later one replaced it.

        An attempt that ended `waiting` was interrupted on purpose: the trial keeps what it has reported so far.
        `alone`: from now on it trains while no other trial of the sweep does.
        """
        assert outcome.state is not TrialState.RUNNING
        values = _outcome_values(trial_id, attempt, outcome)
        del values["diverged_at"]
        return self._changes(REQUEUE, **values, alone=alone)

    def release_unfinished(self, sweep_id: int, *, numbers: Collection[int] = ()) -> list[TrialRow]:
        """Lets killed, running and lost trials wait again, and those with these `numbers`, whatever their state.

        Only for the sweep's holder: what runs belongs to a command that is gone. Returns the released trials.
        """
        return self._trials_of(LET_WAIT, sweep_id=sweep_id, states=CUT_SHORT, numbers=list(numbers))

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
        said = {"spec": canonical_json(spec), "source": source, "description": description, "reopened": reopened}
        self._one(RESTATE, sweep_id=sweep_id, items=canonical_json(items), **said)

    def count_messages(self, sweep_id: int, check_name: str) -> dict[str, int]:
        """What a check said of finished trials in their last attempt, and of how many."""
        with self._single.connect() as connection:
            rows = connection.execute(COUNT_MESSAGES, {"sweep_id": sweep_id, "check_name": check_name})
            return {message: count for message, count in rows}

    # Who drives a sweep

    @contextmanager
    def hold(self, sweep_id: int, mark_runs: Marker = no_runs) -> Iterator[Lease]:
        """Makes this command the sweep's only driver until the block ends or the process dies.

        Raises AlreadyExists naming the holder: process, host and when it was last heard of.
        """
        lease = Lease(self.engine, sweep_id, mark_runs)
        try:
            lease.take()
            yield lease
        finally:
            lease.release()

    def under(self, lease: Lease) -> Ledger:
        """The ledger for the holder of a lease."""
        return Ledger(self.engine, lease)

    def holder(self, sweep_id: int) -> Holder:
        """Who drives the sweep; its name is empty where nobody does. Raises NotFound after a purge."""
        with self._single.connect() as connection:
            row = connection.exec_driver_sql(LOOK, (sweep_id,)).one_or_none()
        return holder_of(row)

    def refuse_held(self, sweep_id: int) -> None:
        """Raises AlreadyExists if another command drives the sweep."""
        holder = self.holder(sweep_id)
        if not holder.is_free:
            raise AlreadyExists(holder.refusal())

    def ask_to_cancel(self, holder: Holder, now: bool) -> Wish | None:
        """Asks the holder to end; the second time, or `now`, at once. Returns the wish; None when it has just ended."""
        values = {"sweep_id": holder.sweep_id, "fence": holder.fence, "now": now}
        with self._single.connect() as connection:
            wish = connection.scalar(ASK_TO_CANCEL, values)
        return None if wish is None else Wish(wish)

    # Plumbing

    @property
    def _fence(self) -> int | None:
        return None if self._lease is None else self._lease.fence

    def _gone(self) -> AlreadyExists | NotFound:
        """Why a write found nothing to change."""
        if self._lease is not None:
            return self._lease.why_not_ours()
        return NotFound("the sweep or trial is gone: it was removed while this command worked on it")

    def _sweep_where(self, condition: Any) -> SweepRow | None:
        with self._single.connect() as connection:
            row = connection.execute(select(Sweep.__table__).where(condition)).mappings().one_or_none()
        return None if row is None else sweep_row(row)

    def _one(self, statement: Any, **values: Any) -> RowMapping:
        with self._single.connect() as connection:
            row = connection.execute(statement, self._fenced(values)).mappings().one_or_none()
        if row is None:
            raise self._gone()
        return row

    def _changes(self, statement: Any, **values: Any) -> bool:
        with self._single.connect() as connection:
            is_changed = connection.execute(statement, self._fenced(values)).first() is not None
        if not is_changed and self._lease is not None:
            self._lease.renew()
        return is_changed

    def _trials_of(self, statement: Any, **values: Any) -> list[TrialRow]:
        with self._single.connect() as connection:
            rows = connection.execute(statement, self._fenced(values)).mappings().all()
        return self._trial_rows(rows)

    def _fenced(self, values: dict[str, Any]) -> dict[str, Any]:
        return {**values, "fence": self._fence}

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
