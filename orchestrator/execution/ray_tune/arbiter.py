"""The sweep's scheduler in a small actor of its own: all workers ask the same one. It carries nothing out."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import ray

from orchestrator.database.connection import is_away
from orchestrator.execution.judging import Case, SchedulerJudge, Start, rebuilt
from orchestrator.execution.patience import PATIENCE_S
from orchestrator.execution.ray_tune.cluster import NAMESPACE
from orchestrator.execution.ray_tune.recorder_actor import ANSWER_TIMEOUT_S
from orchestrator.trial import Decision, Params

RESTART_POLL_S = 0.5


class ArbiterActor:
    """A `Judge` behind Ray's calls. One that died is made again from the ledger."""

    def __init__(self, case: Case, database_url: str) -> None:
        self._case, self._database_url = case, database_url

    @cached_property
    def _judge(self) -> SchedulerJudge:
        """Made for the first question: its process starts while the recorders still store old decisions."""
        return rebuilt(self._case, self._database_url)

    def begin(self, number: int, params: Params, first_step: int) -> Start:
        return self._judge.begin(number, params, first_step)

    def decide(self, number: int, step: int, value: float | None) -> Decision | None:
        return self._judge.decide(number, step, value)

    def over(self, number: int) -> None:
        self._judge.over(number)


class Arbiter:
    """The actor's `Judge`, on whichever side of Ray."""

    def __init__(self, actor: Any, away_patience_s: float = 0.0) -> None:
        """`away_patience_s`: how long to ask again while one that was restarted cannot read the ledger."""
        self._actor, self._away_patience_s = actor, away_patience_s

    @classmethod
    def start(cls, name: str, case: Case, database_url: str) -> Arbiter:
        options = {"name": name, "namespace": NAMESPACE, "num_cpus": 0, "max_restarts": -1}
        return cls(ray.remote(ArbiterActor).options(**options).remote(case, database_url))

    @classmethod
    def find(cls, name: str) -> Arbiter:
        """A worker's: a trial waits for its judge as long as the driver waits for the database."""
        return cls(ray.get_actor(name, namespace=NAMESPACE), away_patience_s=PATIENCE_S)

    def begin(self, number: int, params: Params, first_step: int) -> Start:
        start: Start = self._answer(lambda: self._actor.begin.remote(number, params, first_step))
        return start

    def decide(self, number: int, step: int, value: float | None) -> Decision | None:
        decision: Decision | None = self._answer(lambda: self._actor.decide.remote(number, step, value))
        return decision

    def over(self, number: int) -> None:
        self._actor.over.remote(number)  # one that is being restarted learns it from the ledger

    def _answer(self, ask: Callable[[], Any]) -> Any:
        """Asks again while the actor is being restarted: a question may be repeated, its answer is the same.

        Raises the database's own error where that is what keeps the actor from answering.
        """
        asked_at = time.monotonic()
        while True:
            try:
                return ray.get(ask(), timeout=ANSWER_TIMEOUT_S)
            except ray.exceptions.RayActorError:
                if time.monotonic() - asked_at > ANSWER_TIMEOUT_S:
                    raise
            except ray.exceptions.RayTaskError as error:
                if not is_away(error.cause):
                    raise
                if time.monotonic() - asked_at > self._away_patience_s:
                    raise error.cause from error
            time.sleep(RESTART_POLL_S)
