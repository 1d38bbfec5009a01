"""What the numerics tests share: a context without an orchestrator, and training a config to its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from orchestrator.trial import Report
from workloads.engine.alone import Alone
from workloads.moe_router.config import Config
from workloads.moe_router.train import MoeRouter


@dataclass
class Shelf:
    """Checkpoints in memory; one is due every `every` steps."""

    every: int | None = None
    state: bytes | None = None
    is_kept: bool = False
    steps: list[int] = field(default_factory=list)

    def load(self) -> bytes | None:
        return self.state

    def due(self, step: int) -> bool:
        return self.every is not None and step % self.every == 0

    def save(self, step: int, state: bytes) -> None:
        self.steps.append(step)
        self.state = state


@dataclass
class LonelyContext(Alone):
    """A trial that runs by itself. `stop_after` is the number of updates after which the signal comes."""

    log_every: int = 10**9
    checkpoint: Shelf = field(default_factory=Shelf)
    stop_after: int | None = None
    asked: int = 0

    @property
    def stopping(self) -> bool:
        self.asked += 1
        return self.stop_after is not None and self.asked > self.stop_after

    def artifact(self, path: Path, name: str | None = None) -> None:
        raise AssertionError("no training workload stores an artifact")


def run(config: Config, context: LonelyContext) -> list[Report]:
    return list(MoeRouter().run(config, context))


@lru_cache(maxsize=64)
def final_metrics(settings: frozenset[tuple[str, Any]]) -> dict[str, float]:
    config = Config(**dict(settings))
    return dict(run(config, LonelyContext(config.seed))[-1].metrics)


@pytest.fixture
def train() -> Callable[..., dict[str, float]]:
    """Trains a config to its end and returns the last report's metrics; equal configs are trained once."""
    return lambda **settings: final_metrics(frozenset(settings.items()))


@pytest.fixture
def lonely() -> type[LonelyContext]:
    return LonelyContext


@pytest.fixture
def reports() -> Callable[[Config, LonelyContext], list[Report]]:
    return run
