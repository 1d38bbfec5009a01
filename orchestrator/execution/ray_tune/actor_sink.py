"""The worker's line to its node's recorder. Survives the recorder: what was not on disk is told to the next one."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from orchestrator.execution.inline import decision_of, finding_of, points_of
from orchestrator.execution.job import Job
from orchestrator.execution.ray_tune.recorder_actor import ANSWER_TIMEOUT_S, RESTART_POLL_S, SYNC_S
from orchestrator.execution.words import Receipt, Words
from orchestrator.tracking.recorder import LogLine
from orchestrator.trial import Decision, Finding

MAX_HELD_WORDS = 256  # reports and notes kept back while the recorder has not answered yet; then we wait for it
STALE_ANSWER_S = 0.5  # slow trials must hear of a stop too, at the report after it
STALE_ANSWER_WAIT_S = 0.05


class ActorSink:
    """Sends reports to the node's recorder; waits only when an earlier answer is long outstanding. Thread-safe."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._turn = threading.RLock()  # what a trial prints comes from another thread
        self._words = Words()
        self._answer: Any = None
        self._stopping = False
        self._answered_at = time.monotonic()
        self._away_since: float | None = None  # the recorder; None while it answers

    @property
    def stopping(self) -> bool:
        """As of the last answer; an answer older than `STALE_ANSWER_S` is asked for again."""
        with self._turn:
            if not self._stopping and time.monotonic() - self._answered_at > STALE_ANSWER_S:
                self._send(wait=False, at_least_empty=True)
                ray.wait([self._answer], timeout=STALE_ANSWER_WAIT_S)
                self._collect(wait=False)
            return self._stopping

    def record(self, job: Job, step: int, timestamp_ms: int, metrics: Mapping[str, float]) -> None:
        with self._turn:
            self._words.add(points=[points_of(job, step, timestamp_ms, metrics)])
            self._send(wait=self._words.num_untold >= MAX_HELD_WORDS)

    def finding(self, job: Job, finding: Finding) -> None:
        with self._turn:
            self._words.add(notes=[finding_of(job, finding)])
            self._send(wait=False)

    def decision(self, job: Job, decision: Decision) -> None:
        with self._turn:
            self._words.add(notes=[decision_of(job, decision)])
            self._send(wait=False)

    def printed(self, lines: Sequence[LogLine]) -> None:
        """Takes lines from another thread; returns when they are on their way."""
        with self._turn:
            self._words.add(notes=lines)
            self._send(wait=True)

    def sync(self) -> None:
        """Returns when all words are on the disk of a recorder, whichever life of it that is. Raises TimeoutError."""
        give_up_at = time.monotonic() + ANSWER_TIMEOUT_S
        with self._turn:
            while True:
                self._send(wait=True)
                self._collect(wait=True)
                if not self._words.num_untold:
                    self._hear(self._actor.sync.remote(SYNC_S))
                if self._words.are_safe:
                    return
                if time.monotonic() > give_up_at:
                    raise TimeoutError(f"the journal did not reach its disk within {ANSWER_TIMEOUT_S:g} s")

    def _send(self, wait: bool, at_least_empty: bool = False) -> None:
        if self._collect(wait) and (self._words.num_untold or at_least_empty):
            self._answer = self._actor.take.remote(*self._words.next_batch())

    def _collect(self, wait: bool) -> bool:
        """Takes the outstanding answer; False if it has not come yet."""
        if self._answer is None:
            return True
        if not wait and not ray.wait([self._answer], timeout=0)[0]:
            return False
        answer, self._answer = self._answer, None
        self._hear(answer)
        return True

    def _hear(self, answer: Any) -> None:
        """Takes an answer. A recorder that died is restarted by Ray; all its words that may be lost wait to be told.

        Raises RayActorError when it stays away, and what the recorder raised.
        """
        try:
            receipt: Receipt = ray.get(answer, timeout=2 * ANSWER_TIMEOUT_S)
        except Exception as error:
            self._words.unheard()
            is_restarted = isinstance(error, ray.exceptions.RayActorError)
            self._away_since = self._away_since or time.monotonic()
            if not is_restarted or time.monotonic() - self._away_since > ANSWER_TIMEOUT_S:
                raise
            time.sleep(RESTART_POLL_S)
            return
        self._words.heard(receipt)
        self._stopping, self._answered_at, self._away_since = receipt.stopping, time.monotonic(), None
