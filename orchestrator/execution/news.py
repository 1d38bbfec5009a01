"""What is found about a sweep's trials while a command drives it, each finding once. Shows and stores nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence

from orchestrator.ledger.rows import FoundRow
from orchestrator.ledger.store import Ledger

LOOK_AFTER_S = 2.0


class News:
    """The findings that were stored since this was made: what an earlier command may have shown is old."""

    def __init__(self, ledger: Ledger, sweep_id: int) -> None:
        self._ledger, self._sweep_id = ledger, sweep_id
        self._after = self._newest = ledger.newest_finding()
        self._given: set[int] = set()
        self._looked_at = time.monotonic()

    def is_due(self) -> bool:
        return time.monotonic() - self._looked_at > LOOK_AFTER_S

    def take(self) -> Sequence[FoundRow]:
        """What is new. Looks back as far as the look before the last: a transaction may be late with its lower ids."""
        self._looked_at = time.monotonic()
        rows = self._ledger.findings_after(self._sweep_id, self._after)
        new = [row for row in rows if row.id not in self._given]
        self._given = {row.id for row in rows}
        self._after, self._newest = self._newest, max([self._newest, *self._given])
        return new
