"""Runs one attempt in this process and judges it. The same code serves `--inline` and the Ray workers."""

from __future__ import annotations

import functools
import math
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from orchestrator.execution.checkpoints import CHECK_NAME, RunCheckpoint, owner_of
from orchestrator.execution.code_digest import code_digest
from orchestrator.execution.failures import kind_of
from orchestrator.execution.field_reads import Unwatchable, acts_through_others, unread_finding, watch
from orchestrator.execution.job import Job, Sink, TrialSink
from orchestrator.execution.judging import Judge, Unjudged
from orchestrator.execution.verdict import Ending, Verdict
from orchestrator.tracking.artifacts import store_file
from orchestrator.tracking.recorder import MetricError, legal_key, real_number, whole_step
from orchestrator.trial import (
    Action,
    Decision,
    Failure,
    Finding,
    Outcome,
    Report,
    Severity,
    TrialState,
    as_finding,
    in_words,
)
from orchestrator.workload import Description, Workload, describe, stream_seed

if TYPE_CHECKING:  # commands that train nothing need not load it
    import numpy as np

SOURCE_WAIT_S = 60.0  # for another trial's state: it has been judged, so it is about to be saved
SOURCE_POLL_S = 0.02


class HeardSink:
    """A sink whose findings the verdict hears of, whoever makes them."""

    def __init__(self, sink: TrialSink, verdict: Verdict) -> None:
        self._sink, self._verdict = sink, verdict
        self.record, self.sync = sink.record, sink.sync

    def decision(self, job: Job, decision: Decision) -> None:
        self._sink.decision(job, decision)

    @property
    def stopping(self) -> bool:
        return self._sink.stopping

    def finding(self, job: Job, finding: Finding) -> None:
        self._verdict.hear(finding)
        self._sink.finding(job, finding)


class TrialContext:
    """What a workload may ask of us: see `orchestrator.workload.Context`."""

    def __init__(
        self,
        job: Job,
        sink: Sink,
        config: BaseModel,
        verdict: Verdict,
        owner: str = "",
        code_digest: Callable[[], str] = lambda: "",
    ) -> None:
        """`owner` of its states, where that is not said by the config: copies of other trials may have changed it."""
        self.trial = job.number
        self.attempt = job.attempt
        self.device = job.device
        self.gpu_share = job.gpu_share
        self.thresholds = job.thresholds
        self.told_to_stop = False  # a workload that saw this and returned was interrupted, not finished
        self._job = job
        self._sink = sink
        self._verdict = verdict
        self._trial_seed = int(getattr(config, "seed", 0))
        self.checkpoint = RunCheckpoint(job, owner or owner_of(job.workload, config), sink, verdict, code_digest)

    @property
    def stopping(self) -> bool:
        self.told_to_stop = self.told_to_stop or self._verdict.is_pausing or self._sink.stopping
        return self.told_to_stop

    def should_report(self, step: int) -> bool:
        return step % self._job.log_every == 0

    def seed(self, stream: str) -> int:
        self._verdict.read.add("seed")
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


def run_trial(job: Job, sink: TrialSink, judge: Judge | None = None) -> Outcome:
    """Trains one attempt to its end. Never raises for what the workload does: a trial may die, the sweep goes on."""
    verdict, started = Verdict(job), time.monotonic()
    try:
        workload = describe(job.workload)
        implementation = workload.load()
        started = time.monotonic()  # what the first trial of a process imports is not its cost
        ending = _train(job, HeardSink(sink, verdict), verdict, workload, implementation, judge or Unjudged())
        is_paused = ending is Ending.PAUSED
        outcome = verdict.paused() if is_paused else verdict.outcome(stopped=ending is Ending.INTERRUPTED)
        if outcome.state in (TrialState.FINISHED, TrialState.STOPPED):
            for finding in _unread(job, verdict.read, workload):
                sink.finding(job, finding)
    except TrialTimeout as timeout:
        outcome = verdict.failed(str(timeout), Failure.TIMEOUT)
    except NoState as error:
        outcome = verdict.failed(str(error), Failure.NO_CHECKPOINT)
    except MetricError as error:
        outcome = verdict.failed(str(error), Failure.EXCEPTION)
    except BaseException as error:  # the boundary between the user's code and ours: kept, shown, counted. A signal to
        # the command is none of it: where trials train in its process, it raises nothing (`orchestrator.signals`)
        outcome = verdict.failed(in_words(error), kind_of(error), traceback.format_exc())
    sink.sync()
    return replace(outcome, seconds=time.monotonic() - started, host=socket.gethostname())


class TrialTimeout(Exception):
    """The attempt ran longer than `resources.trial_time`."""


class NoState(Exception):
    """A scheduler needs the trial's state, and its workload did not save it."""


def _train(
    job: Job, sink: TrialSink, verdict: Verdict, workload: Description, implementation: Workload, judge: Judge
) -> Ending:
    """Feeds every report to the sink, the judge and the verdict; returns why there are no more."""
    config = workload.resolve({**job.params, **job.changes})
    owner = owner_of(job.workload, workload.resolve(job.params))
    digest = functools.partial(code_digest, workload.package, type(implementation))
    context = TrialContext(job, sink, config, verdict, owner, digest)
    if job.copy_from is not None and not _copied(job.copy_from, job, sink, context.checkpoint):
        return Ending.INTERRUPTED
    keys = Keys(job, sink, workload)
    end_watch = _watch(job, sink, config, verdict.read)
    try:
        return Attempt(job, sink, verdict, keys, context, judge).follow(implementation.run(config, context))
    finally:
        end_watch()


def _copied(source: int, job: Job, sink: Sink, checkpoint: RunCheckpoint) -> bool:
    """Takes over the other trial's state, and waits for it if it must; False if the sweep was stopped meanwhile."""
    deadline = time.monotonic() + SOURCE_WAIT_S
    while not checkpoint.copy(source):
        if sink.stopping:
            return False
        if time.monotonic() > deadline:
            message = f"trial {source} left no state of step {job.first_step - 1} that could be copied"
            advice = "training goes on from the trial's own state, with the other's parameters"
            sink.finding(job, Finding(CHECK_NAME, Severity.WARNING, message, advice, job.first_step - 1))
            return True
        time.sleep(SOURCE_POLL_S)
    return True


@dataclass
class Attempt:
    """An attempt while it trains, and whoever hears what it says."""

    job: Job
    sink: TrialSink
    verdict: Verdict
    keys: Keys
    context: TrialContext
    judge: Judge
    last_timestamp_ms: int = 0

    def follow(self, reports: Iterator[Report]) -> Ending:
        """Takes reports until there is no more or no need for more."""
        deadline = time.monotonic() + self.job.trial_time_s if self.job.trial_time_s else math.inf
        was_told = False
        try:
            for report in reports:
                if self.context.checkpoint.is_behind:
                    raise NoState(_no_state(self.verdict))
                if self.verdict.is_pausing:  # it saved its state and goes on all the same
                    return Ending.PAUSED
                self._take(report)
                if self.verdict.is_over:
                    return Ending.COMPLETE
                if was_told:  # it does not look at `context.stopping`
                    return Ending.INTERRUPTED
                was_told = self.sink.stopping  # what it does about it, such as saving its state, comes behind it
                if time.monotonic() > deadline:
                    after = f"trial_time = {self.job.trial_time_s:g} s (at step {report.step})"
                    raise TrialTimeout(f"ran longer than {after}")
        finally:
            close = getattr(reports, "close", None)  # iterators that are not generators need no closing
            if close is not None:
                close()
        return self._ending()

    def _take(self, report: Report) -> None:
        """Stores a report, and has the verdict and the judge hear of it."""
        step = whole_step(report.step)
        metrics = {self.keys.legal(name): real_number(name, value) for name, value in report.metrics.items()}
        timestamp_ms = max(int(report.measured_at * 1000), self.job.started_at_ms)
        if step == self.verdict.last_step:  # said again: the later word must be the later point
            timestamp_ms = max(timestamp_ms, self.last_timestamp_ms + 1)
        self.last_timestamp_ms = timestamp_ms
        self.sink.record(self.job, step, timestamp_ms, metrics)
        self.verdict.see(step, metrics)
        self._ask(step, metrics.get(self.job.metric))

    def _ask(self, step: int, objective: float | None) -> None:
        """Has a report judged. What ends an attempt is safe on disk before anybody acts on it."""
        is_complete = self.job.max_steps is not None and step >= self.job.max_steps
        if objective is None and not is_complete:  # nothing can be due
            return
        decision = self.judge.decide(self.job.number, step, objective)
        if decision is None:
            return
        self.sink.decision(self.job, decision)
        if decision.action is not Action.CONTINUE:
            self.sink.sync()
        self.verdict.obey(decision)
        if self.verdict.is_pausing or (self.job.population and not self.verdict.is_over):
            self.context.checkpoint.expect(step, self.verdict.is_pausing)

    def _ending(self) -> Ending:
        """Why the workload returned."""
        if not self.context.told_to_stop:
            return Ending.COMPLETE
        if not self.verdict.is_pausing:
            return Ending.INTERRUPTED
        if self.context.checkpoint.is_behind and not self.sink.stopping:
            raise NoState(_no_state(self.verdict))
        return Ending.INTERRUPTED if self.context.checkpoint.is_behind else Ending.PAUSED


def _no_state(verdict: Verdict) -> str:
    assert verdict.decision is not None
    return (
        f"its workload saved no state after step {verdict.decision.step}, and this scheduler goes on from states; "
        "save with context.checkpoint where `due(step)` and `stopping` ask for it, or choose another scheduler"
    )


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
