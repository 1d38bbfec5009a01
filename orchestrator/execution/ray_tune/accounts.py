"""Whose words may be missing when a recorder went away with its node. Plain bookkeeping: asks nobody, waits for nobody.

A node may come back with its journal, and any recorder that finds a journal brings it over. Whether anything is missing
is therefore told by names: a recorder says which journal is its own and which ones it brought over whole. Where that
does not settle it, we name the trials in question.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from orchestrator.execution.job import Job
from orchestrator.tracking.recorder import Gone, Remainder, Unwritten

Attempt = tuple[int, int]  # the trial's number, the attempt's


@dataclass(frozen=True)
class Account:
    """What a recorder says of itself."""

    host: str
    journal: str  # the path of its folder: of this life, the next one has another
    brought: tuple[str, ...] = ()  # as in `Recorder`, like what follows
    is_clear: bool = False


class Accounts:
    """What the recorders of a command have said, and the attempts whose words none of them has said to be stored."""

    def __init__(self) -> None:
        self.told: dict[str, Unwritten] = {}  # by node, of recorders that are closed
        self._lives: dict[str, dict[str, Account]] = defaultdict(dict)  # by node, by the name of the life's journal
        self._brought: set[str] = set()  # the names of these journals, and of others
        self._left: dict[str, Collection[str]] = {}  # by node, see `closed`
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
        return frozenset(self._unstored.get(node_id, ()))

    def heard(self, node_id: str, account: Account, ended: Collection[Attempt] = ()) -> None:
        """`ended`: the attempts that were unstored there when the recorder was asked."""
        self._lives[node_id][Path(account.journal).name] = account
        self._brought.update(account.brought)
        if account.is_clear:
            for attempt in ended:
                self._unstored[node_id].pop(attempt, None)

    def closed(self, node_id: str, unwritten: Unwritten, left: Collection[str] = ()) -> None:
        """`left`: the names of other journals, in the same place, that still hold something."""
        self.told[node_id], self._left[node_id] = unwritten, left

    def brought_by_others(self, journals: Iterable[str]) -> None:
        self._brought.update(journals)

    def missing(self, node_ids: Iterable[str]) -> list[str]:
        """Of these, the nodes without a last answer whose journals may hold what no other recorder brought over."""
        return [node for node in node_ids if node not in self.told and self._trials(node) and self._unsettled(node)]

    def _trials(self, node_id: str) -> tuple[int, ...]:
        there, somewhere = self._unstored.get(node_id, ()), self._unstored.get("", ())
        return tuple(sorted({number for number, _ in (*there, *somewhere)}))

    def _unsettled(self, node_id: str) -> list[Account]:
        """The lives of its recorder whose journals nobody brought over whole: all, until a closing one has looked."""
        lives = self._lives.get(node_id) or {"": Account(f"Ray's node {node_id[:8]}", "its journal")}
        held = self._left.get(node_id, lives)
        return [life for name, life in lives.items() if name in held and name not in self._brought]

    def remainders(self, node_ids: Iterable[str]) -> list[Remainder]:
        """What is not in the database, of all that recorders on these nodes were told."""
        return [*self.told.values(), *self._left_by_the_dead(), *map(self._gone, self.missing(node_ids))]

    def _left_by_the_dead(self) -> list[Unwritten]:
        """Journals of earlier lives of recorders, which a later one should have brought over and has not."""
        names = sorted(Path(life.journal).name for node_id in self.told for life in self._unsettled(node_id))
        if not names:
            return []
        reason = f"points lie in journals of recorders that died; the next sweep there writes them: {', '.join(names)}"
        return [Unwritten(0, (), reason=reason)]

    def _gone(self, node_id: str) -> Gone:
        last = self._unsettled(node_id)[-1]
        return Gone(last.host, last.journal, self._trials(node_id))
