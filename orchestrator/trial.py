"""Plain values that cross module boundaries: trials, reports, findings. No storage, no clock beyond a time stamp."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Params = Mapping[str, Any]

OWN_CHECKS = ("checkpoint", "metric_name", "probe_failed", "unread_field")
"""What orch itself may find about a trial, whatever its workload."""


class TrialState(StrEnum):
    """A trial's fate. `lost` is a trial whose whole sweep command vanished while it ran."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    DIVERGED = "diverged"
    FAILED = "failed"
    KILLED = "killed"
    LOST = "lost"

    @property
    def is_result(self) -> bool:
        """True for the states that answer the sweep's question: a diverged trial is a result."""
        return self in (TrialState.FINISHED, TrialState.STOPPED, TrialState.DIVERGED)

    @property
    def is_over(self) -> bool:
        return self not in (TrialState.WAITING, TrialState.RUNNING)

    @property
    def mlflow_status(self) -> str:
        """The status MLflow shows for this state."""
        if self.is_result:
            return "FINISHED"
        return {TrialState.WAITING: "SCHEDULED", TrialState.RUNNING: "RUNNING", TrialState.FAILED: "FAILED"}.get(
            self, "KILLED"
        )


class Failure(StrEnum):
    """What kind of failure ended an attempt; decides whether a retry makes sense."""

    NONE = ""
    EXCEPTION = "exception"
    WORKER_DEATH = "worker_death"
    OUT_OF_MEMORY = "out_of_memory"
    TIMEOUT = "timeout"
    NO_OBJECTIVE = "no_objective"
    NO_RECORD = "no_record"


class Severity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def rank(self) -> int:
        """0 for the mildest."""
        return list(Severity).index(self)


@dataclass(frozen=True)
class Report:
    """What a trial says at one step. `measured_at` (seconds since the epoch) is fixed here: replays are idempotent."""

    step: int
    metrics: Mapping[str, float]
    measured_at: float = field(default_factory=time.time)


def storable(text: str) -> str:
    """The text without what PostgreSQL cannot hold: NUL and lone surrogates are spelled out."""
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True)
class Finding:
    """Something a probe or a check saw."""

    check_name: str
    severity: Severity
    message: str
    advice: str = ""
    step: int | None = None
    value: float | None = None
    threshold: float | None = None

    def __post_init__(self) -> None:
        for name in ("check_name", "message", "advice"):
            object.__setattr__(self, name, storable(getattr(self, name)))


@dataclass(frozen=True)
class Candidate:
    """A configuration to try, before it has a row in the ledger.

    `params` holds every parameter the sweep file names, fixed ones included, with values of their declared types.
    `cell` holds the grid axes without `seed`. `sample` numbers the configuration inside its cell, from 0; `None`
    when nothing is sampled.
    """

    params: Params
    cell: Params
    sample: int | None = None


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    state: TrialState
    objective: float | None = None  # the sweep's metric at its last report; may be non-finite
    last_step: int | None = None
    diverged_at: int | None = None
    reason: str = ""  # one line: why it diverged, failed or was stopped
    error: str = ""  # the traceback, when there is one
    failure: Failure = Failure.NONE
    seconds: float | None = None  # of training, measured where it trained; None when that died with it
    host: str = ""  # where it trained

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", storable(self.reason))
        object.__setattr__(self, "error", storable(self.error))


@dataclass(frozen=True)
class Told:
    """What a searcher is told of one trial that is over, or still running (`state` RUNNING, no value)."""

    candidate: Candidate
    state: TrialState
    objective: float | None


def canonical_json(value: Any) -> str:
    """JSON with sorted keys; infinities become the texts `Infinity` and `-Infinity`, which SQL can cast back."""
    return json.dumps(jsonable(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def jsonable(value: Any) -> Any:
    """A copy of `value` that JSON can hold. Raises TypeError for anything but scalars, lists and mappings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{value!r} ({type(value).__name__}) cannot be stored as a parameter")


def config_hash(params: Params) -> str:
    """Identifies a configuration inside a sweep: equal values in another spelling or order hash alike."""
    return hashlib.sha256(canonical_json(params).encode()).hexdigest()[:32]
