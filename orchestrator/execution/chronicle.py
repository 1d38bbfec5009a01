"""Keeps what a command says of the sweep that it drives, so that anybody who reaches the database can follow it.

Holds up nobody: a thread writes, and what the database does not take at once waits in memory until it does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from orchestrator.database.borrow import Engine, borrowed
from orchestrator.database.connection import is_away
from orchestrator.execution.printing import cut
from orchestrator.masking import hide
from orchestrator.tracking.bulk import write_logs
from orchestrator.tracking.records import LogLine
from orchestrator.trial import storable

STREAM = "sweep"
END = "the command ended"  # how its last line begins
GATHER_S = 0.5  # what is said together is written together
RETRY_AFTER_S = 1.0


class Chronicle:
    """The lines of one command. `say` before `open` is kept for later; what a refused command said goes nowhere."""

    def __init__(self) -> None:
        self._state = threading.Condition()  # guards what follows
        self._waiting: list[tuple[str, int]] = []  # text, milliseconds since the epoch
        self._num_written = 0
        self._is_closing = False
        self._writer: threading.Thread | None = None

    def say(self, text: str) -> None:
        now_ms = int(time.time() * 1000)
        with self._state:
            self._waiting += [(storable(cut(line)), now_ms) for line in text.splitlines()]
            self._state.notify_all()

    def open(self, engine: Engine, sweep_id: int, number: int) -> None:
        """Begins to write. `number` tells this command's lines from those of others that drove the sweep."""
        arguments = (engine, sweep_id, number)
        self._writer = threading.Thread(target=self._write, args=arguments, name="orch-chronicle", daemon=True)
        self._writer.start()

    def close(self, timeout_s: float) -> None:
        """Writes the rest, if the database takes it in time; a command does not wait for its own words."""
        with self._state:
            self._is_closing = True
            self._state.notify_all()
        if self._writer is not None:
            self._writer.join(timeout_s)

    def _write(self, engine: Engine, sweep_id: int, number: int) -> None:
        secrets = [str(engine.url.password or "")]  # no line says them, wherever it has them from
        while said := self._next():
            lines = [
                LogLine(sweep_id, None, number, STREAM, self._num_written + index, hide(text, secrets), written_at_ms)
                for index, (text, written_at_ms) in enumerate(said)
            ]
            if _written(engine, lines):
                with self._state:
                    del self._waiting[: len(said)]
                    self._num_written += len(said)
            else:
                with self._state:
                    self._state.wait(RETRY_AFTER_S)

    def _next(self) -> Sequence[tuple[str, int]]:
        """What waits, soon after something does; empty when there will be no more."""
        with self._state:
            self._state.wait_for(lambda: self._waiting or self._is_closing)
            self._state.wait_for(lambda: self._is_closing, GATHER_S)
            return list(self._waiting)


def _written(engine: Engine, lines: Sequence[LogLine]) -> bool:
    """False if the database does not take them now: away, full, read-only. That is for others to report."""
    try:
        with borrowed(engine) as connection:
            write_logs(connection, lines)
    except Exception as error:
        if not is_away(error):
            raise
        return False
    return True
