"""When to kill: at any time, or just when something is being written, where a kill hurts most. Kills nothing."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psycopg

from benchmarks.chaos.kills import wait_for
from benchmarks.chaos.lab import Command, Lab

ANY_TIME_S = 12.0
START_S = 4.0
SIGN_TIMEOUT_S = 20.0  # longer than a sweep's start
AFTER_SIGN_S = 0.03
AFTER_END_S = 0.2
SIGN_POLL_S = 0.005

Moment = Callable[[Lab, Command, random.Random], None]


def any_time(lab: Lab, command: Command, chance: random.Random) -> None:
    _let_pass(command, chance.uniform(0.0, ANY_TIME_S))


def start(lab: Lab, command: Command, chance: random.Random) -> None:
    """While Ray, the recorders and the first workers come up, if the command is young."""
    _let_pass(command, chance.uniform(0.0, START_S))


def save(lab: Lab, command: Command, chance: random.Random) -> None:
    """Just when a state is written."""
    _after_change(command, lambda: _states(lab), chance.uniform(0.0, AFTER_SIGN_S))


def flush(lab: Lab, command: Command, chance: random.Random) -> None:
    """Just when the journal grows."""
    _after_change(command, lambda: _sizes(lab), chance.uniform(0.0, AFTER_SIGN_S))


def end(lab: Lab, command: Command, chance: random.Random) -> None:
    """Just when a trial ends or begins."""
    _after_change(command, lambda: _num_attempts(lab), chance.uniform(0.0, AFTER_END_S), poll_s=0.05)


MOMENTS: dict[str, Moment] = {
    moment.__name__.replace("_", " "): moment for moment in (any_time, start, save, flush, end)
}


def _let_pass(command: Command, seconds: float) -> None:
    command.wait(seconds)


def _after_change(command: Command, sign: Callable[[], object], wait_s: float, poll_s: float = SIGN_POLL_S) -> None:
    before = sign()
    wait_for(lambda: sign() != before or command.process.poll() is not None, SIGN_TIMEOUT_S, poll_s)
    command.family.look()
    time.sleep(wait_s)


def _states(lab: Lab) -> set[Path]:
    return set((lab.home.path / "artifacts").glob("*/*/artifacts-checkpoints/step-*"))


def _sizes(lab: Lab) -> dict[Path, int]:
    sizes = {}
    for path in lab.journal.glob("*/*.journal"):
        with suppress(FileNotFoundError):  # just drained
            sizes[path] = path.stat().st_size
    return sizes


def _num_attempts(lab: Lab) -> tuple[object, ...]:
    """Begun and ended ones; (-1,) while the database is away."""
    try:
        with lab.connect() as connection:
            row = connection.execute("select count(*), count(ended_at) from orch_ledger.attempts").fetchone()
            return row or (0, 0)
    except psycopg.OperationalError:
        return (-1,)
