"""Waits for a database that takes nothing for a while, so that a sweep outlives its restart or its full disk.

Meanwhile training goes on: reports lie in the recorders' journals, and what ended waits here to be written. The person
is told once what the matter is and once that it is over. Any other error passes through.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from orchestrator.database.connection import is_away, why_away
from orchestrator.errors import DatabaseLost, DatabaseLostWhenInterrupted, DatabaseUnavailable

PATIENCE_S = 15 * 60.0
PATIENCE_WHEN_INTERRUPTED_S = 5.0
PAUSES_S = (0.2, 3.0)  # the first and the longest
NUM_REVIVALS = 5  # in one absence: a server that dies again and again is left alone
REVIVE_EVERY_S = 10.0
HICCUP_S = 2.0  # what is over sooner is not worth a word, as long as nobody has to wait for it

T = TypeVar("T")


class Patience:
    """Does again what failed because the database was away."""

    def __init__(
        self,
        say: Callable[[str], None],
        is_interrupted: Callable[[], bool],
        on_return: Callable[[], None],
        revive: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_return` is called when the database answers again, before the work is done again.

        `revive` starts a database of our own that was killed, or raises DatabaseUnavailable.
        """
        self._say, self._is_interrupted, self._on_return = say, is_interrupted, on_return
        self._revive, self._num_revivals = revive, 0
        self._since: float | None = None  # when the trouble began
        self._is_told = False
        self._noted = ""  # what the others who use the database said last

    def note(self, why: str) -> None:
        """Why others cannot use the database, such as a recorder or the lease; empty when they can."""
        self._noted = why
        if not why:
            self._end()
        elif self._begun() > HICCUP_S:
            self._tell(why)
            self._try_to_revive()

    def __call__(self, work: Callable[[], T], again: Callable[[], T] | None = None) -> T:
        """What `work` returns. `again` takes its place after a failure, for work that may have been half done.

        Raises DatabaseLost when the database stays away too long.
        """
        try:
            return work()
        except Exception as error:
            if not is_away(error):
                raise
            self._begun()
            self._tell(why_away(error))
        since, pause_s = time.monotonic(), PAUSES_S[0]
        while True:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSES_S[1])
            self._try_to_revive()
            try:
                self._on_return()
                answer = (again or work)()
            except Exception as error:
                if not is_away(error):
                    raise
                self._give_up_after(time.monotonic() - since, error)
                continue
            if not self._noted:
                self._end()
            return answer

    def _begun(self) -> float:
        """How long the trouble has lasted, in seconds; it begins now if there was none."""
        self._since = self._since or time.monotonic()
        return time.monotonic() - self._since

    def _try_to_revive(self) -> None:
        if self._num_revivals < NUM_REVIVALS and self._begun() >= self._num_revivals * REVIVE_EVERY_S:
            self._num_revivals += 1
            try:
                self._revive()
            except DatabaseUnavailable as error:
                self._say(str(error))

    def _tell(self, why: str) -> None:
        if not self._is_told:
            self._is_told = True
            hint = " (any orch command starts an embedded server that was stopped)" if "connection" in why else ""
            self._say(
                f"the database takes nothing at the moment ({why}); training goes on, reports are kept in the journal"
                + hint
            )

    def _end(self) -> None:
        if self._is_told:
            self._say(f"the database is back after {self._begun():.0f} s")
        self._since, self._is_told, self._num_revivals = None, False, 0

    def _give_up_after(self, waited_s: float, error: Exception) -> None:
        if waited_s > (PATIENCE_WHEN_INTERRUPTED_S if self._is_interrupted() else PATIENCE_S):
            lost = DatabaseLostWhenInterrupted if self._is_interrupted() else DatabaseLost
            raise lost(
                f"the database has taken nothing for {waited_s:.0f} s ({why_away(error)}); what was reported is safe "
                "in the journal and is written by the next command; when the database is back, run the same command "
                "with --resume"
            ) from error
