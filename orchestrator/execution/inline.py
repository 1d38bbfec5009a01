"""Runs a sweep's trials one after another in this process: for debugging and tests. No Ray."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from orchestrator.execution.job import Feed, Job
from orchestrator.execution.trial_run import run_trial
from orchestrator.tracking.recorder import FindingRow, Points, Recorder, Remainder, connect_by_url
from orchestrator.trial import Finding

SYNC_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 60.0
CLOSE_AFTER_ERROR_TIMEOUT_S = 5.0  # a person waits for the message; the journal keeps what is not written yet


def points_of(job: Job, step: int, timestamp_ms: int, metrics: Mapping[str, float]) -> Points:
    return Points(job.run_id, job.trial_id, job.attempt, step, timestamp_ms, metrics)


def finding_of(job: Job, finding: Finding) -> FindingRow:
    return FindingRow(job.sweep_id, job.trial_id, job.attempt, finding)


class RecorderSink:
    """Hands a trial's words straight to this process's recorder."""

    def __init__(self, recorder: Recorder, feed: Feed) -> None:
        self._recorder, self._feed = recorder, feed

    @property
    def stopping(self) -> bool:
        self._feed.tick()
        return self._feed.stopping

    def record(self, job: Job, step: int, timestamp_ms: int, metrics: Mapping[str, float]) -> None:
        self._recorder.record([points_of(job, step, timestamp_ms, metrics)])

    def finding(self, job: Job, finding: Finding) -> None:
        self._recorder.findings([finding_of(job, finding)])

    def sync(self) -> None:
        self._recorder.sync(SYNC_TIMEOUT_S)


def run_inline(feed: Feed, database_url: str, journal_folder: Path) -> Remainder:
    """Runs every job of `feed` until there is none left or the sweep is being stopped.

    Returns what the recorder could not write in time.
    """
    recorder = Recorder(functools.partial(connect_by_url, database_url), journal_folder)
    sink = RecorderSink(recorder, feed)
    close_timeout_s = CLOSE_TIMEOUT_S
    try:
        while not feed.stopping and (job := feed.next_job()) is not None:
            feed.ended(job, run_trial(job, sink))
    except BaseException:
        close_timeout_s = CLOSE_AFTER_ERROR_TIMEOUT_S
        raise
    finally:
        remainder = recorder.close(close_timeout_s)
    feed.recorded()
    return remainder
