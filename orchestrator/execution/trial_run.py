"""Runs one attempt in this process and judges it. The same code serves `--inline` and the Ray workers."""

from __future__ import annotations

import math
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from orchestrator.execution.checkpoints import RunCheckpoint, owner_of
from orchestrator.execution.field_reads import Unwatchable, acts_through_others, unread_finding, watch
from orchestrator.execution.job import Job, Sink
from orchestrator.execution.verdict import Verdict
from orchestrator.tracking.artifacts import store_file
from orchestrator.tracking.recorder import MetricError, legal_key, real_number, whole_step
from orchestrator.trial import Failure, Finding, Outcome, Report, Severity, TrialState, as_finding, in_words
from orchestrator.workload import Description, Workload, describe, stream_seed

if TYPE_CHECKING:  # commands that train nothing need not load it
    import numpy as np


class HeardSink:
    """A sink whose findings the verdict hears of, whoever makes them."""

    def __init__(self, sink: Sink, verdict: Verdict) -> None:
        self._sink, self._verdict = sink, verdict
        self.record, self.sync = sink.record, sink.sync

    @property
    def stopping(self) -> bool:
        return self._sink.stopping

    def finding(self, job: Job, finding: Finding) -> None:
        self._verdict.hear(finding)
        self._sink.finding(job, finding)


class TrialContext:
    """What a workload may ask of us: see `orchestrator.workload.Context`."""

    def __init__(self, job: Job, sink: Sink, config: BaseModel, verdict: Verdict) -> None:
        self.trial = job.number
        self.attempt = job.attempt
        self.device = job.device
        self.thresholds = job.thresholds
        self.told_to_stop = False  # a workload that saw this and returned was interrupted, not finished
        self._job = job
        self._sink = sink
        self._read = verdict.read
        self._trial_seed = int(getattr(config, "seed", 0))
        self.checkpoint = RunCheckpoint(job, owner_of(job.workload, config), sink, verdict)

    @property
    def stopping(self) -> bool:
        self.told_to_stop = self.told_to_stop or self._sink.stopping
        return self.told_to_stop

    def should_report(self, step: int) -> bool:
        return step % self._job.log_every == 0

    def seed(self, stream: str) -> int:
        self._read.add("seed")
        return stream_seed(self._trial_seed, stream)

    def generator(self, stream: str) -> np.random.Generator:
        import numpy as np

        return np.random.default_rng(self.seed(stream))

    def finding(self, finding: Finding) -> None:
        self._sink.finding(self._job, as_finding(finding))

    def artifact(self, path: Path, name: str | None = None) -> None:
        store_file(self._job.artifact_uri, path, name)


class Keys:
    """Checks each metric name once: illegal ones are mapped, undeclared ones pass; both leave a warning finding."""

    def __init__(self, job: Job, sink: Sink, workload: Description) -> None:
        self._job, self._sink, self._workload = job, sink, workload
        self._known: dict[str, str] = {}

    def legal(self, name: str) -> str:
        if name not in self._known:
            self._known[name] = legal_key(name)
            self._warn(name, self._known[name])
        return self._known[name]

    def _warn(self, name: str, legal: str) -> None:
        if legal != name:
            message, advice = (
                f"metric {name!r} is stored as {legal!r}",
                "MLflow does not allow this name; choose another",
            )
        elif not self._workload.declares(name):
            message, advice = f"metric {name!r} is not declared", f"add it to `metrics` of {self._workload.name}"
        else:
            return
        self._sink.finding(self._job, Finding("metric_name", Severity.WARNING, message, advice))


def run_trial(job: Job, sink: Sink) -> Outcome:
    """Trains one attempt to its end. Never raises for what the workload does: a trial may die, the sweep goes on."""
    verdict, started = Verdict(job), time.monotonic()
    try:
        workload = describe(job.workload)
        implementation = workload.load()
        started = time.monotonic()  # what the first trial of a process imports is not its cost
        stopped = _train(job, HeardSink(sink, verdict), verdict, workload, implementation)
        outcome = verdict.outcome(stopped)
        if outcome.state in (TrialState.FINISHED, TrialState.STOPPED):
            for finding in _unread(job, verdict.read, workload):
                sink.finding(job, finding)
    except TrialTimeout as timeout:
        outcome = verdict.failed(str(timeout), Failure.TIMEOUT)
    except MetricError as error:
        outcome = verdict.failed(str(error), Failure.EXCEPTION)
    except (Exception, SystemExit) as error:  # the boundary between the user's code and ours: kept, shown, counted
        outcome = verdict.failed(in_words(error), _kind(error), traceback.format_exc())
    sink.sync()
    return replace(outcome, seconds=time.monotonic() - started, host=socket.gethostname())


def _kind(error: BaseException) -> Failure:
    """Out of memory is told apart, torch's own by its name: the orchestrator does not import torch."""
    is_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return Failure.OUT_OF_MEMORY if is_memory else Failure.EXCEPTION


class TrialTimeout(Exception):
    """The attempt ran longer than `resources.trial_time`."""


def _train(job: Job, sink: Sink, verdict: Verdict, workload: Description, implementation: Workload) -> bool:
    """Feeds every report to the sink and the verdict; returns True if the sweep was stopped before the trial ended."""
    config = workload.resolve(job.params)
    context = TrialContext(job, sink, config, verdict)
    keys = Keys(job, sink, workload)
    end_watch = _watch(job, sink, config, verdict.read)
    try:
        return _follow(implementation.run(config, context), job, sink, verdict, keys) or context.told_to_stop
    finally:
        end_watch()


def _follow(reports: Iterator[Report], job: Job, sink: Sink, verdict: Verdict, keys: Keys) -> bool:
    """Takes reports until there is no more or no need for more; returns True if the sweep was stopped before that."""
    deadline = time.monotonic() + job.trial_time_s if job.trial_time_s else math.inf
    last_timestamp_ms, was_told = 0, False
    try:
        for report in reports:
            step = whole_step(report.step)
            metrics = {keys.legal(name): real_number(name, value) for name, value in report.metrics.items()}
            timestamp_ms = _timestamp_ms(report, job)
            if step == verdict.last_step:  # said again: the later word must be the later point
                timestamp_ms = max(timestamp_ms, last_timestamp_ms + 1)
            last_timestamp_ms = timestamp_ms
            sink.record(job, step, timestamp_ms, metrics)
            verdict.see(step, metrics)
            if verdict.is_over:
                return False
            if was_told:  # it does not look at `context.stopping`
                return True
            was_told = sink.stopping  # what it does about it, such as saving its state, comes behind its report
            if time.monotonic() > deadline:
                raise TrialTimeout(f"ran longer than trial_time = {job.trial_time_s:g} s (at step {step})")
    finally:
        close = getattr(reports, "close", None)  # iterators that are not generators need no closing
        if close is not None:
            close()
    return False


def _watch(job: Job, sink: Sink, config: BaseModel, read: set[str]) -> Callable[[], None]:
    """Begins to note which swept fields are read. A config that cannot be watched counts as read and gets a finding."""
    try:
        return watch(config, job.axes, read)
    except Unwatchable as error:
        read.update(job.axes)
        message = f"whether the trial reads {', '.join(job.axes)} is not watched: {error}"
        sink.finding(
            job, Finding("probe_failed", Severity.WARNING, message, "training went on; allow subclasses of Config")
        )
        return lambda: None


def _unread(job: Job, read: set[str], workload: Description) -> list[Finding]:
    """A finding for each swept field that changed nothing in this trial."""
    idle = (
        name
        for name, values in job.axes.items()
        if name not in read and not acts_through_others(workload.resolve, job.params, name, values)
    )
    return [unread_finding(name) for name in idle]


def _timestamp_ms(report: Report, job: Job) -> int:
    return max(int(report.measured_at * 1000), job.started_at_ms)
