"""Training in turns of a few steps, so that two loops can be compared while a busy machine disturbs both alike."""

from __future__ import annotations

import time
from collections.abc import Callable

from workloads.engine.training import Training

STEPS_PER_TURN = 10  # the default log_every


def turn_of(training: Training, reporting: bool = True) -> Callable[[], None]:
    """Ten updates; with `reporting` the tenth is reported."""

    def turn() -> None:
        for _ in range(STEPS_PER_TURN):
            update, hyper = training.advance()
        if reporting:
            training.report(update, hyper)

    return turn


def cpu_seconds(turn: Callable[[], None]) -> float:
    started = time.process_time()
    turn()
    return time.process_time() - started
