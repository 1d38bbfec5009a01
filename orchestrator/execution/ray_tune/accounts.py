"""Whose words may be missing when a recorder went away with its node. Plain bookkeeping: asks nobody, waits for nobody.

A node may come back with its journal, and any recorder that finds a journal brings it over. Whether anything is missing
is therefore told by names: a recorder says which journal is its own and which ones it brought over whole. Where that
does not settle it, we name the trials in question.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.execution.job import Job
from orchestrator.tracking.recorder import Gone, Remainder

Attempt = tuple[int, int]  # the trial's number, the attempt's


@dataclass(frozen=True)
class Standing:
    """What a recorder says of itself."""

    host: str
    journal: str  # the path of its folder: of this life, the next one has another
    brought: tuple[str, ...]  # as in `Recorder`, like what follows
    is_clear: bool
    database_error: str
    disk_error: str


class Accounts:
    """What the recorders of a command have said, and the attempts whose words none of them has said to be stored."""

    def __init__(self) -> None:
        self.standings: dict[str, Standing] = {}  # by node, as of the last answer
        self.told: dict[str, Remainder] = {}  # by node, of recorders that are closed
        self._journals: set[str] = set()  # the names of all that recorders ever called their own
        self._brought: set[str] = set()  # of these, and of others
        self._unstored: dict[str, dict[Attempt, int]] = defaultdict(dict)  # by node, see `ended`: their first steps

    def began(self, job: Job) -> None:
        """What an attempt measures anew is not missing, wherever an earlier one told it."""
        for attempts in self._unstored.values():
            for number, attempt in [one for one, first_step in attempts.items() if job.first_step <= first_step]:
                if number == job.number:
                    del attempts[number, attempt]

    def ended(self, job: Job, node_id: str) -> None:
        """What an attempt told the recorder of its node (empty: of one that nobody knows) may not be stored yet."""
        self._unstored[node_id][job.number, job.attempt] = job.first_step

    def unstored(self, node_id: str) -> Collection[Attempt]:
        return frozenset(self._unstored[node_id])

    def heard(self, node_id: str, standing: Standing, ended: Collection[Attempt] = ()) -> None:
        """`ended`: the attempts that were unstored there when the recorder was asked."""
        self.standings[node_id] = standing
        self._journals.add(Path(standing.journal).name)
        self._brought.update(standing.brought)
        if standing.is_clear:
            for attempt in ended:
                self._unstored[node_id].pop(attempt, None)

    def unheard(self, node_id: str) -> None:
        """It is being started again, or its node is gone: it complains of nothing."""
        if (last := self.standings.get(node_id)) is not None:
            self.standings[node_id] = replace(last, database_error="", disk_error="")

    def closed(self, node_id: str, remainder: Remainder) -> None:
        self.told[node_id] = remainder
        self._brought.update(remainder.brought)

    def brought_by_others(self, journals: Iterable[str]) -> None:
        self._brought.update(journals)

    def missing(self, node_ids: Iterable[str]) -> list[str]:
        """Of these, the nodes without a last answer whose journal may hold what no other recorder brought over."""
        return [node for node in node_ids if node not in self.told and self._trials(node) and not self._is_safe(node)]

    def _is_safe(self, node_id: str) -> bool:
        standing = self.standings.get(node_id)
        return standing is not None and Path(standing.journal).name in self._brought

    def _trials(self, node_id: str) -> tuple[int, ...]:
        return tuple(sorted({number for number, _ in (*self._unstored[node_id], *self._unstored[""])}))

    def remainders(self, node_ids: Iterable[str]) -> list[Remainder]:
        """What is not in the database, of all that recorders on these nodes were told."""
        gone = [Remainder(0, (), gone=self._gone(node_id)) for node_id in self.missing(node_ids)]
        return [*self.told.values(), *gone, *self._left()]

    def _gone(self, node_id: str) -> Gone:
        standing = self.standings.get(node_id)
        host, journal = (standing.host, standing.journal) if standing else (f"Ray's node {node_id[:8]}", "its journal")
        return Gone(host, journal, self._trials(node_id))

    def _left(self) -> list[Remainder]:
        """Journals of earlier lives of recorders, which a later one should have brought over and has not."""
        settled = self._brought.union(one.journal for one in self.told.values())
        seen = {name for one in self.told.values() for name in one.left}
        left = sorted(seen & self._journals - settled)
        if not left:
            return []
        reason = f"points lie in journals of recorders that died; the next sweep there writes them: {', '.join(left)}"
        return [Remainder(0, (), reason=reason)]
