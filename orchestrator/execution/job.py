"""What travels between a sweep's driver and whoever trains a trial. Plain values that survive JSON; no secrets."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from orchestrator.trial import Decision, Failure, Finding, Outcome, TrialState

if TYPE_CHECKING:  # the check of a workload makes a job and needs no database
    from orchestrator.execution.judging import Case, Judge


@dataclass(frozen=True)
class Job:
    """One attempt at one trial."""

    sweep_id: int
    trial_id: int
    number: int
    attempt: int
    run_id: str
    workload: str
    params: Mapping[str, Any]
    metric: str
    stop_diverged: bool
    log_every: int
    checkpoint_every: int
    started_at_ms: int  # no point of this attempt is older, whatever the worker's clock says
    artifact_uri: str
    first_step: int = 0  # this attempt's points supersede those of earlier ones from here on
    device: str = "cpu"
    trial_time_s: float | None = None
    thresholds: Mapping[str, float] = field(default_factory=dict)  # of the sweep's `health`, by name
    stop_on: Sequence[str] = ()  # findings of these checks end the trial as stopped
    axes: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # what the sweep varies, and some of the values
    more_metrics: Sequence[str] = ()  # further objectives
    changes: Mapping[str, Any] = field(default_factory=dict)  # what copies of other trials have changed of `params`
    copy_from: int | None = None  # the trial whose state of the step before `first_step` takes the place of ours
    max_steps: int | None = None  # where the scheduler ends a trial, whatever it reports there
    mode: str = "min"  # the better `metric`: min or max
    keep_checkpoints: bool = False  # the last and the best one, also when the trial has its result
    git_commit: str = ""  # of the workload's code
    alone: bool = False  # it ran out of memory beside others: trains while no other does, in a process of its own
    gpu_share: float = 0.0  # of one GPU, or a number of whole ones
    population: str = ""  # the folder in which members of a population find each other's states; empty: there is none

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        return cls(**json.loads(text))


def outcome_to_json(outcome: Outcome) -> str:
    return json.dumps(asdict(outcome))


def outcome_from_json(text: str) -> Outcome:
    values = json.loads(text)
    values |= {"state": TrialState(values["state"]), "failure": Failure(values["failure"])}
    return Outcome(**{**values, "more_objectives": tuple(values["more_objectives"])})


class Sink(Protocol):
    """Where a running trial's words go."""

    @property
    def stopping(self) -> bool:
        """True once the sweep is being stopped."""

    def record(self, job: Job, step: int, timestamp_ms: int, metrics: Mapping[str, float]) -> None: ...

    def finding(self, job: Job, finding: Finding) -> None: ...

    def sync(self) -> None:
        """Returns when everything said so far is safe on disk."""


class TrialSink(Sink, Protocol):
    """One that also takes what is decided about the trial."""

    def decision(self, job: Job, decision: Decision) -> None: ...


class Feed(Protocol):
    """What a backend asks of the sweep it works for."""

    @property
    def stopping(self) -> bool: ...

    @property
    def case(self) -> Case | None:
        """What a judge of the trials is to be made of; None where nobody judges."""

    def judged_by(self, judge: Judge) -> None:
        """Whom to ask from now on; said before the first job is taken."""

    @property
    def overdue(self) -> bool:
        """True when trials that still run have had their time to stop: their workers are to be ended."""

    def next_job(self) -> Job | None:
        """The next attempt to run, or None when there is none now."""

    def exhausted(self) -> bool:
        """True when `next_job` will never give another one, whatever the running trials return."""

    def ended(self, job: Job, outcome: Outcome) -> None: ...

    def placeable(self, hosts: Mapping[str, str]) -> None:
        """Which machines can take a trial now: their addresses, by Ray's id."""

    @property
    def avoided(self) -> Collection[str]:
        """Ids of the machines that take no more trials."""

    def troubled(self, database: str, disk: str) -> None:
        """Said again and again: why points do not reach the database, and why the journal; empty when they do."""

    def broken(self, why: str) -> None:
        """Said from any thread: the backend is gone. Does not return."""

    def tick(self) -> None:
        """Called several times a second while trials run."""

    def recorded(self) -> None:
        """Called at the end, when all that was said is in the database, as far as it could be brought there."""
