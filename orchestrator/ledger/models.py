"""The ledger's tables: sweeps, trials, attempts, findings, decisions and logs. Holds no metrics; those are MLflow's."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    DateTime,
    ForeignKey,
    Identity,
    Index,
    Integer,
    MetaData,
    Text,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, DOUBLE_PRECISION, JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

SCHEMA = "orch_ledger"

Moment = DateTime(timezone=True)
TRIAL = f"{SCHEMA}.trials.id"
SWEEP = f"{SCHEMA}.sweeps.id"


class SweepState(StrEnum):
    """Where a sweep stands. `created` has trials but no driver yet; all others but `finished` can be resumed."""

    CREATED = "created"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_live(self) -> bool:
        """True for a sweep that will say more."""
        return self in (SweepState.CREATED, SweepState.RUNNING)

    @property
    def is_settled(self) -> bool:
        """True for one that came to an end of its own, or was ended on purpose: there is nothing to cancel."""
        return self in (SweepState.FINISHED, SweepState.CANCELLED, SweepState.FAILED)


class Wish(StrEnum):
    """What a sweep's holder is asked to do. `cancel` is a first Ctrl-C, `cancel_now` a second one."""

    NONE = ""
    CANCEL = "cancel"
    CANCEL_NOW = "cancel_now"

    @classmethod
    def _missing_(cls, value: object) -> Wish:
        """Of a word that somebody wrote by hand: it asks for nothing, and must not end who reads it."""
        return cls.NONE


class Base(DeclarativeBase):
    metadata = MetaData(
        schema=SCHEMA,
        naming_convention={
            "pk": "%(table_name)s_pkey",
            "fk": "%(table_name)s_%(column_0_name)s_fkey",
        },
    )


class Sweep(Base):
    """One question. An archived sweep is called `<name>~<id>`, so that its name is free again."""

    __tablename__ = "sweeps"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    name: Mapped[str] = mapped_column(Text)
    workload: Mapped[str] = mapped_column(Text)
    description: Mapped[str] = mapped_column(Text, server_default="")
    spec: Mapped[dict[str, Any]] = mapped_column(JSONB)  # resolved
    source: Mapped[str] = mapped_column(Text, server_default="")  # the file's text
    columns: Mapped[list[list[str]]] = mapped_column(JSONB, server_default=text("'[]'::jsonb"))  # [field, SQL type], ..
    metric: Mapped[str] = mapped_column(Text)
    mode: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(Text, server_default=SweepState.CREATED.value)
    experiment_id: Mapped[str | None] = mapped_column(Text)  # MLflow's
    tags: Mapped[dict[str, str]] = mapped_column(JSONB, server_default=text("'{}'::jsonb"))
    created_at: Mapped[datetime] = mapped_column(Moment, server_default=func.now())
    started_at: Mapped[datetime | None] = mapped_column(Moment)
    ended_at: Mapped[datetime | None] = mapped_column(Moment)
    archived_at: Mapped[datetime | None] = mapped_column(Moment)
    holder: Mapped[str] = mapped_column(Text, server_default="")  # `<pid>@<host>` of the command that drives it
    holder_process: Mapped[str] = mapped_column(Text, server_default="")  # the same, unmistakable on its machine
    heartbeat_at: Mapped[datetime | None] = mapped_column(Moment)  # the holder's last word; null: nobody holds it
    fence: Mapped[int] = mapped_column(BigInteger, server_default="0")  # grows with each holder: the fencing token
    wanted: Mapped[str] = mapped_column(Text, server_default="")  # what the holder is asked to do: a Wish

    __table_args__ = (
        Index("sweeps_name_key", "name", unique=True),
        CheckConstraint("wanted in ('', 'cancel', 'cancel_now')", name="sweeps_wanted_check"),
    )


class Trial(Base):
    """One configuration of a sweep and its fate. JSON holds infinities as the texts `Infinity` and `-Infinity`."""

    __tablename__ = "trials"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    sweep_id: Mapped[int] = mapped_column(BigInteger, ForeignKey(SWEEP, ondelete="CASCADE"))
    number: Mapped[int] = mapped_column(Integer)  # from 0
    params: Mapped[dict[str, Any]] = mapped_column(JSONB)  # what the file names, fixed values included
    config: Mapped[dict[str, Any]] = mapped_column(JSONB)  # the whole resolved config, by dotted field name
    config_hash: Mapped[str] = mapped_column(Text)
    cell: Mapped[dict[str, Any]] = mapped_column(JSONB)  # the grid axes without `seed`
    sample: Mapped[int | None] = mapped_column(Integer)
    state: Mapped[str] = mapped_column(Text, server_default="waiting")  # a TrialState
    run_id: Mapped[str | None] = mapped_column(Text)  # MLflow's, known before training starts
    diverged_at: Mapped[int | None] = mapped_column(BigInteger)  # step
    reason: Mapped[str] = mapped_column(Text, server_default="")
    error: Mapped[str] = mapped_column(Text, server_default="")
    objective: Mapped[float | None] = mapped_column(DOUBLE_PRECISION)  # may be non-finite
    more_objectives: Mapped[list[float | None]] = mapped_column(  # the sweep's further metrics, in their order
        ARRAY(DOUBLE_PRECISION), server_default=text("'{}'::double precision[]")
    )
    last_step: Mapped[int | None] = mapped_column(BigInteger)
    attempts: Mapped[int] = mapped_column(Integer, server_default="0")
    started_at: Mapped[datetime | None] = mapped_column(Moment)
    ended_at: Mapped[datetime | None] = mapped_column(Moment)
    host: Mapped[str] = mapped_column(Text, server_default="")
    device: Mapped[str] = mapped_column(Text, server_default="")
    git_commit: Mapped[str] = mapped_column(Text, server_default="")
    alone: Mapped[bool] = mapped_column(server_default=text("false"))  # ran out of memory: trains when no other does

    __table_args__ = (
        Index("trials_sweep_id_config_hash_key", "sweep_id", "config_hash", unique=True),
        Index("trials_sweep_id_number_key", "sweep_id", "number", unique=True),
        Index("trials_run_id_key", "run_id", unique=True),
        # A claim looks for the trial that is least far and must not read the thousands that are over.
        Index(
            "trials_waiting",
            text("sweep_id"),
            text("alone"),
            text("last_step nulls first"),
            text("number"),
            postgresql_where=text("state = 'waiting'"),
        ),
        # The view `runs` finds the trial that another one is held against by its parameters.
        Index("trials_params", "params", postgresql_using="hash"),
    )


class Attempt(Base):
    """One try at a trial. From `first_step` on it supersedes the points and findings of earlier tries."""

    __tablename__ = "attempts"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    trial_id: Mapped[int] = mapped_column(BigInteger, ForeignKey(TRIAL, ondelete="CASCADE"))
    number: Mapped[int] = mapped_column(Integer)  # from 1
    state: Mapped[str] = mapped_column(Text, server_default="running")  # a TrialState
    started_at: Mapped[datetime] = mapped_column(Moment, server_default=func.now())
    first_step: Mapped[int] = mapped_column(BigInteger, server_default="0")
    ended_at: Mapped[datetime | None] = mapped_column(Moment)
    host: Mapped[str] = mapped_column(Text, server_default="")
    pid: Mapped[int | None] = mapped_column(Integer)
    failure: Mapped[str] = mapped_column(Text, server_default="")  # a Failure
    error: Mapped[str] = mapped_column(Text, server_default="")
    seconds: Mapped[float | None] = mapped_column(DOUBLE_PRECISION)  # of training, measured where it trained

    __table_args__ = (Index("attempts_trial_id_number_key", "trial_id", "number", unique=True),)


class FindingRow(Base):
    """What a probe or check saw. Without a trial it belongs to the sweep's preflight."""

    __tablename__ = "findings"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    sweep_id: Mapped[int] = mapped_column(BigInteger, ForeignKey(SWEEP, ondelete="CASCADE"))
    trial_id: Mapped[int | None] = mapped_column(BigInteger, ForeignKey(TRIAL, ondelete="CASCADE"))
    attempt: Mapped[int | None] = mapped_column(Integer)
    check_name: Mapped[str] = mapped_column(Text)
    severity: Mapped[str] = mapped_column(Text)  # a Severity
    step: Mapped[int | None] = mapped_column(BigInteger)
    value: Mapped[float | None] = mapped_column(DOUBLE_PRECISION)
    threshold: Mapped[float | None] = mapped_column(DOUBLE_PRECISION)
    message: Mapped[str] = mapped_column(Text, server_default="")
    advice: Mapped[str] = mapped_column(Text, server_default="")
    created_at: Mapped[datetime] = mapped_column(Moment, server_default=func.now())

    __table_args__ = (
        # A replayed journal writes the same finding again: one row. Two messages of one check at one step are two.
        Index(
            "findings_replay_key",
            text("sweep_id"),
            text("trial_id"),
            text("attempt"),
            text("check_name"),
            text("coalesce(step, '-1'::integer)"),
            text("md5(message)"),
            unique=True,
            postgresql_nulls_not_distinct=True,
        ),
        Index("findings_trial_id", "trial_id"),
    )


class DecisionRow(Base):
    """What a scheduler decided about a trial at a step. The attempt is the one that came to that step first."""

    __tablename__ = "decisions"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    sweep_id: Mapped[int] = mapped_column(BigInteger, ForeignKey(SWEEP, ondelete="CASCADE"))
    trial_id: Mapped[int] = mapped_column(BigInteger, ForeignKey(TRIAL, ondelete="CASCADE"))
    attempt: Mapped[int] = mapped_column(Integer)
    step: Mapped[int] = mapped_column(BigInteger)
    value: Mapped[float | None] = mapped_column(DOUBLE_PRECISION)  # the objective it was judged by; may be non-finite
    action: Mapped[str] = mapped_column(Text)  # an Action
    reason: Mapped[str] = mapped_column(Text, server_default="")
    source: Mapped[int | None] = mapped_column(Integer)  # number of the trial whose state is copied
    params: Mapped[dict[str, Any]] = mapped_column(JSONB, server_default=text("'{}'::jsonb"))  # what changes
    created_at: Mapped[datetime] = mapped_column(Moment, server_default=func.now())

    __table_args__ = (
        # A replayed journal and an attempt that does a step again say the same. A pause may end in a copy, at its step.
        Index("decisions_replay_key", "trial_id", "step", "action", unique=True),
        Index("decisions_sweep_id", "sweep_id", "id"),
    )


class LogRow(Base):
    """A line that a trial printed, or that the sweep's command said (without a trial)."""

    __tablename__ = "logs"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    sweep_id: Mapped[int] = mapped_column(BigInteger, ForeignKey(SWEEP, ondelete="CASCADE"))
    trial_id: Mapped[int | None] = mapped_column(BigInteger, ForeignKey(TRIAL, ondelete="CASCADE"))
    attempt: Mapped[int | None] = mapped_column(Integer)
    line_number: Mapped[int] = mapped_column(BigInteger)  # from 0, within the attempt, over both its streams
    stream: Mapped[str] = mapped_column(Text)  # stdout, stderr, sweep
    line: Mapped[str] = mapped_column(Text)
    written_at: Mapped[datetime] = mapped_column(Moment)

    __table_args__ = (
        # A replayed journal writes the same line again: one row.
        Index(
            "logs_replay_key",
            "sweep_id",
            "trial_id",
            "attempt",
            "stream",
            "line_number",
            unique=True,
            postgresql_nulls_not_distinct=True,
        ),
        Index("logs_sweep_id", "sweep_id", "id"),
    )


class Reader(Base):
    """Which login `orch sql` uses, with a verifier of its password: tells cheaply whether the role is up to date."""

    __tablename__ = "readers"

    role: Mapped[str] = mapped_column(Text, primary_key=True)
    verifier: Mapped[str] = mapped_column(Text)
    made_at: Mapped[datetime] = mapped_column(Moment, server_default=func.now())
