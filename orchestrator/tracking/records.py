"""What a recorder carries: points, findings, decisions, log lines, checked where they enter. Stores nothing."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from orchestrator.masking import hide, mask
from orchestrator.trial import Action, Decision, Finding, Severity, jsonable, real, whole

MAX_KEY_LENGTH = 250  # characters; the width of MLflow's column


class MetricError(ValueError):
    """A reported value is not a real number, or its name or step is of the wrong type."""


@dataclass(frozen=True, slots=True)
class Points:
    """What a run measured at one step. `timestamp_ms` is fixed when it is measured, so that a replay is recognised."""

    run_id: str
    trial_id: int
    attempt: int
    step: int
    timestamp_ms: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class FindingRow:
    """A finding and whose it is. Without a trial it belongs to the sweep's preflight."""

    sweep_id: int
    trial_id: int | None
    attempt: int | None
    finding: Finding


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """What a scheduler decided about a trial, and which attempt at it was at that step."""

    sweep_id: int
    trial_id: int
    attempt: int
    decision: Decision


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line that a trial printed, or that a command said of its sweep: then without a trial.

    `attempt` is the try that printed it; of a command's line, the number of the command that drove the sweep.
    """

    sweep_id: int
    trial_id: int | None
    attempt: int
    stream: str  # stdout, stderr, sweep
    number: int  # from 0 in the attempt, over its streams: in the order of writing
    text: str  # storable, without its line end
    written_at_ms: int


Note = FindingRow | DecisionRow | LogLine
Record = Points | Note


def checked(points: Points, secrets: tuple[str, ...] = ()) -> Points:
    """A copy with legal names, without these secrets, and true floats.

    Raises MetricError naming the metric that is not a number.
    """
    metrics = {legal_key(name, secrets): real_number(name, value) for name, value in points.metrics.items()}
    return replace(points, step=whole_step(points.step), timestamp_ms=int(points.timestamp_ms), metrics=metrics)


def whole_step(step: Any) -> int:
    """`step` as an int; numpy integers count. Raises MetricError for anything else, or one beyond 64 bits."""
    try:
        return whole("step", step)
    except (TypeError, ValueError) as error:
        raise MetricError(str(error)) from error


def real_number(name: str, value: Any) -> float:
    """`value` as a float; numpy and torch scalars count. Raises MetricError, naming the metric, for anything else."""
    if type(value) is float:
        return value
    try:
        return real(f"metric {name!r}", value)
    except TypeError as error:
        raise MetricError(str(error)) from error


@lru_cache(maxsize=100_000)
def legal_key(name: str, secrets: tuple[str, ...] = ()) -> str:
    """The name under which MLflow keeps the metric: `name` itself if it may be one, else a legal name like it.

    MLflow 3.17 allows letters, digits and `_ - . : /` and space in names that read the same as a path, up to 250
    characters. A changed name ends in four digits of a hash, so that `load[0]` and `load(0)` stay two series.
    Source: mlflow/utils/validation.py, `_validate_metric_name`.
    """
    if not isinstance(name, str):
        raise MetricError(f"metric name {name!r:.200} is not text")
    parts = (re.sub(r"[^\w.\- :]", "_", part) for part in hide(mask(name), secrets).split("/"))
    legal = "/".join(part for part in parts if part not in ("", ".", "..")) or "_"
    legal = f"_{legal}" if legal.startswith("..") else legal
    if legal == name and len(name) <= MAX_KEY_LENGTH:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:4]
    return f"{legal[: MAX_KEY_LENGTH - 5]}-{digest}"


def discreet(note: Note, secrets: Sequence[str]) -> Note:
    """The note without these secrets, wherever they stand in its text."""
    if not secrets:
        return note
    if isinstance(note, LogLine):
        return replace(note, text=hide(note.text, secrets))
    if isinstance(note, DecisionRow):
        return replace(note, decision=replace(note.decision, reason=hide(note.decision.reason, secrets)))
    message, advice = hide(note.finding.message, secrets), hide(note.finding.advice, secrets)
    return replace(note, finding=replace(note.finding, message=message, advice=advice))


def num_points(records: Iterable[Record]) -> int:
    """How many rows the records become."""
    return sum(len(record.metrics) if isinstance(record, Points) else 1 for record in records)


def to_json(record: Record) -> list[Any]:
    """What a journal keeps of a record; `from_json` reads it back."""
    if isinstance(record, Points):
        fields = (record.run_id, record.trial_id, record.attempt, record.step, record.timestamp_ms)
        return ["points", *fields, dict(record.metrics)]
    if isinstance(record, DecisionRow):
        return ["decision", record.sweep_id, record.trial_id, record.attempt, *_told(record.decision)]
    owner = (record.sweep_id, record.trial_id, record.attempt)
    if isinstance(record, LogLine):
        return ["log", *owner, record.stream, record.number, record.text, record.written_at_ms]
    finding = record.finding
    told = (finding.check_name, finding.severity.value, finding.message, finding.advice)
    return ["finding", *owner, *told, finding.step, finding.value, finding.threshold]


def from_json(fields: list[Any]) -> Record:
    kind, *rest = fields
    if kind == "points":
        return Points(*rest)
    if kind == "decision":
        sweep_id, trial_id, attempt, trial, step, value, action, *rest = rest
        return DecisionRow(sweep_id, trial_id, attempt, Decision(trial, step, value, Action(action), *rest))
    if kind == "log":
        return LogLine(*rest)
    sweep_id, trial_id, attempt, check_name, severity, *told = rest
    return FindingRow(sweep_id, trial_id, attempt, Finding(check_name, Severity(severity), *told))


def _told(decision: Decision) -> list[Any]:
    """The fields of a decision, in their order."""
    told = (decision.trial, decision.step, decision.value, decision.action.value, decision.reason)
    return [*told, decision.source, jsonable(decision.params)]
