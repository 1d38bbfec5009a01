"""Waits for a database that is away for a while, so that a sweep outlives its restart. Any other error passes through.

Meanwhile training goes on: reports lie in the recorders' journals, and what ended waits here to be written.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from orchestrator.database.connection import is_away, why_away
from orchestrator.errors import DatabaseLost

PATIENCE_S = 15 * 60.0
PATIENCE_WHEN_INTERRUPTED_S = 10.0
PAUSES_S = (0.2, 3.0)  # the first and the longest

T = TypeVar("T")


class Patience:
    """Does again what failed because the database was away."""

    def __init__(
        self, say: Callable[[str], None], is_interrupted: Callable[[], bool], on_return: Callable[[], None]
    ) -> None:
        """`on_return` is called when the database answers again, before the work is done again."""
        self._say, self._is_interrupted, self._on_return = say, is_interrupted, on_return

    def __call__(self, work: Callable[[], T], again: Callable[[], T] | None = None) -> T:
        """What `work` returns. `again` takes its place after a failure, for work that may have been half done.

        Raises DatabaseLost when the database stays away too long.
        """
        try:
            return work()
        except Exception as error:
            if not is_away(error):
                raise
            first_error = error
        self._say(
            f"the database does not answer ({why_away(first_error)}); training goes on, waiting for it"
            " (any orch command starts an embedded server again)"
        )
        since, pause_s = time.monotonic(), PAUSES_S[0]
        while True:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSES_S[1])
            try:
                self._on_return()
                answer = (again or work)()
            except Exception as error:
                if not is_away(error):
                    raise
                self._give_up_after(time.monotonic() - since, error)
                continue
            self._say(f"the database is back after {time.monotonic() - since:.0f} s")
            return answer

    def _give_up_after(self, waited_s: float, error: Exception) -> None:
        if waited_s > (PATIENCE_WHEN_INTERRUPTED_S if self._is_interrupted() else PATIENCE_S):
            raise DatabaseLost(
                f"the database has been away for {waited_s:.0f} s ({why_away(error)}); what was reported is safe in "
                "the journal; when the database is back, run the same command with --resume"
            ) from error
