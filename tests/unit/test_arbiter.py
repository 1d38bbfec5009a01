"""Questions to a judge that was restarted while the database is away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
import ray

from orchestrator.database.connection import is_away
from orchestrator.execution.ray_tune import arbiter


def judge_without_a_ledger(monkeypatch: pytest.MonkeyPatch, num_failures: int) -> Any:
    """An actor whose first answers are Ray's wrapped word that no server takes connections."""
    with pytest.raises(psycopg.OperationalError) as refused:
        psycopg.connect("host=127.0.0.1 port=1 connect_timeout=1")
    answers: list[Any] = [ray.exceptions.RayTaskError("begin", "traceback", refused.value)] * num_failures

    def get(question: Any, timeout: float) -> Any:
        if answers:
            raise answers.pop()
        return question

    monkeypatch.setattr(arbiter.ray, "get", get)
    monkeypatch.setattr(arbiter, "RESTART_POLL_S", 0.01)
    answer = SimpleNamespace(remote=lambda *asked: asked)
    return SimpleNamespace(begin=answer, decide=answer)


def test_the_driver_hears_that_the_database_is_away_and_waits_as_for_its_own_questions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judge = arbiter.Arbiter(judge_without_a_ledger(monkeypatch, num_failures=1))
    with pytest.raises(psycopg.OperationalError) as caught:
        judge.begin(3, {}, 0)
    assert is_away(caught.value)
    assert judge.begin(3, {}, 0) == (3, {}, 0)


def test_a_worker_asks_again_until_the_judge_can_read_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = arbiter.Arbiter(judge_without_a_ledger(monkeypatch, num_failures=3), away_patience_s=60.0)
    assert judge.decide(3, 10, 0.5) == (3, 10, 0.5)
