"""Counts the time in which a sweep's trials run, earlier commands included, and says when it is used up."""

from __future__ import annotations

import time

from orchestrator.ledger.store import Ledger


class TimeBudget:
    """The union of the intervals in which at least one trial runs. Asks the ledger once, and not without a limit."""

    def __init__(self, limit_s: float | None, ledger: Ledger, sweep_id: int) -> None:
        self._limit_s = limit_s
        self._spent_s = 0.0 if limit_s is None else ledger.busy_seconds(sweep_id)  # until `_since`
        self._since = time.monotonic()
        self._num_running = 0
        self.is_up = False
        self.look()

    def begun(self) -> None:
        """A trial runs from now on."""
        self.look()
        self._num_running += 1

    def ended(self) -> None:
        self.look()
        self._num_running -= 1

    def look(self) -> None:
        """Once it is up it stays so: trials that were told to stop must not be told to go on."""
        now = time.monotonic()
        if self._num_running:
            self._spent_s += now - self._since
        self._since = now
        self.is_up = self.is_up or (self._limit_s is not None and self._spent_s >= self._limit_s)
