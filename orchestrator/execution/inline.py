"""Runs a sweep's trials one after another in this process: for debugging and tests. No Ray."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from orchestrator.execution.job import Feed, Job
from orchestrator.execution.judging import Judge, Unjudged, rebuilt
from orchestrator.execution.printing import captured
from orchestrator.execution.trial_run import run_trial
from orchestrator.tracking.recorder import (
    DecisionRow,
    FindingRow,
    Points,
    Recorder,
    Remainder,
    connect_by_url,
    secrets_of,
)
from orchestrator.trial import Decision, Finding

SYNC_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 60.0
CLOSE_AFTER_ERROR_TIMEOUT_S = 5.0  # a person waits for the message; the journal keeps what is not written yet


def points_of(job: Job, step: int, timestamp_ms: int, metrics: Mapping[str, float]) -> Points:
    return Points(job.run_id, job.trial_id, job.attempt, step, timestamp_ms, metrics)


def finding_of(job: Job, finding: Finding) -> FindingRow:
    return FindingRow(job.sweep_id, job.trial_id, job.attempt, finding)


def decision_of(job: Job, decision: Decision) -> DecisionRow:
    return DecisionRow(job.sweep_id, job.trial_id, job.attempt, decision)


class RecorderSink:
    """Hands a trial's words straight to this process's recorder."""

    def __init__(self, recorder: Recorder, feed: Feed) -> None:
        self._recorder, self._feed = recorder, feed

    @property
    def stopping(self) -> bool:
        self._feed.troubled(self._recorder.database_error, self._recorder.disk_error)
        self._feed.tick()
        return self._feed.stopping

    def record(self, job: Job, step: int, timestamp_ms: int, metrics: Mapping[str, float]) -> None:
        self._recorder.record([points_of(job, step, timestamp_ms, metrics)])

    def finding(self, job: Job, finding: Finding) -> None:
        self._recorder.notes([finding_of(job, finding)])

    def decision(self, job: Job, decision: Decision) -> None:
        self._recorder.notes([decision_of(job, decision)])

    def sync(self) -> None:
        self._recorder.sync(SYNC_TIMEOUT_S)


def run_inline(feed: Feed, database_url: str, journal_folder: Path) -> Remainder:
    """Runs every job of `feed` until there is none left or the sweep is being stopped.

    Returns what the recorder could not write in time.
    """
    connect = functools.partial(connect_by_url, database_url)
    recorder = Recorder(connect, journal_folder, secrets=secrets_of(database_url))
    sink = RecorderSink(recorder, feed)
    close_timeout_s = CLOSE_TIMEOUT_S
    try:
        judge = _judge(feed, recorder, database_url)
        while not feed.stopping and (job := feed.next_job()) is not None:
            with captured(job, recorder.notes, sink.sync, is_shown=True):
                outcome = run_trial(job, sink, judge)
            feed.ended(job, outcome)
    except BaseException:
        close_timeout_s = CLOSE_AFTER_ERROR_TIMEOUT_S
        raise
    finally:
        remainder = recorder.close(close_timeout_s)
    feed.recorded()
    return remainder


def _judge(feed: Feed, recorder: Recorder, database_url: str) -> Judge:
    """The sweep's scheduler, in this process; what dead commands left of its decisions is stored before."""
    if feed.case is None:
        return Unjudged()
    recorder.drain(SYNC_TIMEOUT_S)
    judge = rebuilt(feed.case, database_url)
    feed.judged_by(judge)
    return judge
