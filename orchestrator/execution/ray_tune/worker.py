"""The worker's side: one long-lived process trains one trial after another, so torch is imported once."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any

import ray
from ray import tune

from orchestrator.execution.inline import decision_of, finding_of, points_of
from orchestrator.execution.job import Job, outcome_to_json
from orchestrator.execution.judging import Judge, Unjudged
from orchestrator.execution.ray_tune.arbiter import Arbiter
from orchestrator.execution.ray_tune.cluster import NAMESPACE
from orchestrator.execution.ray_tune.recorder_actor import ANSWER_TIMEOUT_S, recorder_name
from orchestrator.execution.trial_run import run_trial
from orchestrator.tracking.recorder import Note, Points
from orchestrator.trial import Decision, Failure, Finding, Outcome, TrialState
from orchestrator.workload import describe

MAX_HELD_POINTS = 256  # reports kept back while the recorder has not answered yet; then we wait for it
RESTART_POLL_S = 0.5
STALE_ANSWER_S = 0.5  # slow trials must hear of a stop too, at the report after it
STALE_ANSWER_WAIT_S = 0.05
SILENCE_GRACE_S = 10.0  # after trial_time, how long we wait for a report before the process ends itself


class ActorSink:
    """Sends reports to the node's recorder; waits only when an earlier answer is long outstanding."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._points: list[Points] = []
        self._notes: list[Note] = []
        self._answer: Any = None
        self._sent: tuple[list[Points], list[Note]] = ([], [])
        self._stopping = False
        self._answered_at = time.monotonic()

    @property
    def stopping(self) -> bool:
        """As of the last answer; an answer older than `STALE_ANSWER_S` is asked for again."""
        if not self._stopping and time.monotonic() - self._answered_at > STALE_ANSWER_S:
            self._send(wait=False, at_least_empty=True)
            ray.wait([self._answer], timeout=STALE_ANSWER_WAIT_S)
            self._collect(wait=False)
        return self._stopping

    def record(self, job: Job, step: int, timestamp_ms: int, metrics: Mapping[str, float]) -> None:
        self._points.append(points_of(job, step, timestamp_ms, metrics))
        self._send(wait=len(self._points) >= MAX_HELD_POINTS)

    def finding(self, job: Job, finding: Finding) -> None:
        self._notes.append(finding_of(job, finding))
        self._send(wait=False)

    def decision(self, job: Job, decision: Decision) -> None:
        self._notes.append(decision_of(job, decision))
        self._send(wait=False)

    def sync(self) -> None:
        self._send(wait=True)
        self._collect(wait=True)
        self._stopping = ray.get(self._actor.sync.remote(ANSWER_TIMEOUT_S), timeout=2 * ANSWER_TIMEOUT_S)

    def _answered(self) -> bool:
        """The outstanding answer. A recorder that died is restarted by Ray and told again: writes may be repeated."""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            try:
                return bool(ray.get(self._answer, timeout=ANSWER_TIMEOUT_S))
            except ray.exceptions.RayActorError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(RESTART_POLL_S)
                self._answer = self._actor.take.remote(*self._sent)

    def _send(self, wait: bool, at_least_empty: bool = False) -> None:
        if self._collect(wait) and (self._points or self._notes or at_least_empty):
            self._sent = (self._points, self._notes)
            self._answer = self._actor.take.remote(*self._sent)
            self._points, self._notes = [], []

    def _collect(self, wait: bool) -> bool:
        """Takes the outstanding answer; False if it has not come yet."""
        if self._answer is None:
            return True
        if not wait and not ray.wait([self._answer], timeout=0)[0]:
            return False
        self._stopping = self._answered()
        self._answer, self._answered_at = None, time.monotonic()
        return True


class TrialWorker(tune.Trainable):  # type: ignore[misc]
    """A Tune trainable whose one `step` trains a whole trial; reused, so processes and imports are paid for once."""

    def setup(self, config: dict[str, Any]) -> None:
        node_id = ray.get_runtime_context().get_node_id()
        self._sink_actor = ray.get_actor(recorder_name(config["recorder"], node_id), namespace=NAMESPACE)
        self._judge: Judge = Arbiter.find(config["arbiter"]) if config["arbiter"] else Unjudged()
        describe(config["workload"]).load()

    def step(self) -> dict[str, Any]:
        job = Job.from_json(self.config["job"])
        watchdog = _watchdog(job)
        try:
            outcome = run_trial(job, ActorSink(self._sink_actor), self._judge)
        except Exception as error:  # not the workload's, ours: a full journal, a recorder that stays away
            reason = f"its reports could not be kept: {str(error).strip().splitlines()[-1] if str(error) else error!r}"
            outcome = Outcome(
                TrialState.FAILED, reason=reason[:500], error=traceback.format_exc(), failure=Failure.NO_RECORD
            )
        finally:
            if watchdog is not None:
                watchdog.cancel()
        return {"outcome": outcome_to_json(outcome), "done": True}

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.config = new_config
        return True


def _watchdog(job: Job) -> threading.Timer | None:
    """Ends this process when a trial stays silent past its time; the driver sees the death and knows the deadline."""
    if not job.trial_time_s:
        return None
    timer = threading.Timer(job.trial_time_s + SILENCE_GRACE_S, os._exit, args=(124,))
    timer.daemon = True
    timer.start()
    return timer
