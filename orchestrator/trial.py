"""Plain values that cross module boundaries: trials, reports, findings. No storage, no clock beyond a time stamp."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import re
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from orchestrator.masking import mask

Params = Mapping[str, Any]

OWN_CHECKS = ("checkpoint", "metric_name", "probe_failed", "unread_field")
"""What orch itself may find about a trial, whatever its workload."""

OWN_EARLY_CHECKS = ("check_failed", "not_checked")
"""What orch itself may find about a sweep before it trains. Ends no trial."""

MAX_TEXT = 20_000  # characters of an error's text, or of a finding's

CONTROL = re.compile(  # but for tabs and line ends; the last two ranges reverse the text that follows them
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)


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
    def is_sound(self) -> bool:
        """True for a result whose values count: it trained to its end, or until it was stopped."""
        return self in (TrialState.FINISHED, TrialState.STOPPED)

    @property
    def is_over(self) -> bool:
        return self not in (TrialState.WAITING, TrialState.RUNNING)

    @property
    def is_unfinished(self) -> bool:
        """True for what whoever resumes the sweep goes on with unasked: it has no result, and no failure of its own."""
        return not self.is_result and self is not TrialState.FAILED

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
    WORKER_START = "worker_start"
    OUT_OF_MEMORY = "out_of_memory"
    TIMEOUT = "timeout"
    NO_OBJECTIVE = "no_objective"
    NO_CHECKPOINT = "no_checkpoint"
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
    """The text without what PostgreSQL cannot hold, a terminal would obey, or looks like a password.

    Control characters, NUL among them, and lone surrogates are spelled out; tabs and line ends stay.
    """
    return shown(mask(text)).encode("utf-8", "backslashreplace").decode()


def shown(text: str) -> str:
    """The text with its control characters spelled out, but for tabs and line ends: no terminal or page obeys them."""
    return CONTROL.sub(lambda found: f"\\x{code:02x}" if (code := ord(found[0])) < 256 else f"\\u{code:04x}", text)


def bounded(text: str) -> str:
    """A storable text of at most about `MAX_TEXT` characters: its beginning, what is left out, its end.

    Cut generously before passwords are looked for, and to size afterwards: none of them is cut in two.
    """
    if len(text) <= MAX_TEXT:
        return storable(text)
    half = MAX_TEXT // 2
    left_out = f"\n[orch: {len(text) - 2 * half} characters are left out]\n"
    return storable(text[: 2 * half])[:half] + left_out + storable(text[-2 * half :])[-half:]


def real(name: str, value: Any) -> float:
    """`value` as Python's own float; numbers of numpy or torch count. Raises TypeError, with the name, for others."""
    if not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise TypeError(f"{name} is {value!r:.100}, not a number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise TypeError(f"{name} is not a number: {error}") from error


def whole(name: str, value: Any) -> int:
    """`value` as Python's own int; integers of numpy or torch count.

    Raises TypeError for anything else and ValueError for one beyond 64 bits, with the name.
    """
    try:
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} is {value!r:.100}, not a whole number") from error
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name} does not fit into 64 bits")
    return number


@dataclass(frozen=True)
class Finding:
    """Something a probe or a check saw, in plain values that anybody can store.

    Raises TypeError or ValueError, with the field's name, for what is no text, number or severity.
    """

    check_name: str
    severity: Severity
    message: str
    advice: str = ""
    step: int | None = None
    value: float | None = None
    threshold: float | None = None

    def __post_init__(self) -> None:
        plain: dict[str, Any] = {name: _text(name, getattr(self, name)) for name in ("check_name", "message", "advice")}
        plain["severity"] = _severity(self.severity)
        plain["step"] = None if self.step is None else whole("a finding's step", self.step)
        for name in ("value", "threshold"):
            given = getattr(self, name)
            plain[name] = None if given is None else real(f"a finding's {name}", given)
        for name, value in plain.items():
            object.__setattr__(self, name, value)


def _text(name: str, given: Any) -> str:
    if not isinstance(given, str):
        raise TypeError(f"a finding's {name} is {given!r:.100}, not a text")
    return bounded(given)


def _severity(given: Any) -> Severity:
    try:
        return Severity(given)
    except ValueError:
        raise ValueError(f"a finding's severity is {given!r:.100}, not one of {', '.join(Severity)}") from None


def as_finding(said: Any) -> Finding:
    """What a workload says it found. Raises TypeError for what is no Finding."""
    if not isinstance(said, Finding):
        raise TypeError(f"a Finding is due, this is {said!r:.100}")
    return said


class Action(StrEnum):
    """What a scheduler lets a trial do at a step."""

    CONTINUE = "continue"
    STOP = "stop"
    PAUSE = "pause"  # save the state, give the worker to others, go on later
    EXPLOIT = "exploit"  # go on from another trial's state, with other parameters


@dataclass(frozen=True)
class Decision:
    """What a scheduler decided about a trial at a step, and why, in words with figures."""

    trial: int  # its number
    step: int
    value: float | None  # the objective it was judged by; None when it was not reported
    action: Action
    reason: str
    source: int | None = None  # exploit: the number of the trial whose state is copied
    params: Params = field(default_factory=dict)  # exploit: the parameters that change, with their new values

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", storable(self.reason))


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
    """How an attempt ended; `waiting`: its state is saved, and the trial goes on in another attempt."""

    state: TrialState
    objective: float | None = None  # the sweep's metric at its last report; may be non-finite
    last_step: int | None = None
    diverged_at: int | None = None
    reason: str = ""  # one line: why it diverged, failed or was stopped
    error: str = ""  # the traceback, when there is one; bounded
    failure: Failure = Failure.NONE
    seconds: float | None = None  # of training, measured where it trained; None when that died with it
    host: str = ""  # where it trained
    more_objectives: tuple[float | None, ...] = ()  # the sweep's further metrics, at their last report
    node: str = ""  # Ray's id of the machine where it trained; empty: this process, or nobody knows

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", storable(self.reason))
        object.__setattr__(self, "error", bounded(self.error))


@dataclass(frozen=True)
class Told:
    """What a searcher is told of one trial that is over, or still running (`state` RUNNING, no value)."""

    candidate: Candidate
    state: TrialState
    objective: float | None
    more_objectives: tuple[float | None, ...] = ()
    last_step: int | None = None  # of a stopped trial: where its objective was measured


def in_words(error: BaseException) -> str:
    """`ValueError: no rows`, also of an error that cannot say what it is."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException as second:  # what a text may raise is as free as what a workload may
        return f"{type(error).__name__}, whose own text fails with {type(second).__name__}"


def told(error: BaseException) -> str:
    """`ValueError: no rows (my_lab.py:37)`, where it was raised; of a value refused here, where it was handed over."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if frame.filename not in (__file__, "<string>")]  # <string>: of a dataclass
    return in_words(error) + (f" ({line_of(places[-1])})" if places else "")


def line_of(frame: traceback.FrameSummary) -> str:
    """`my_lab.py:37`."""
    return f"{Path(frame.filename).name}:{frame.lineno}"


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
