"""Gives out the trials of a sweep one by one, and asks the searcher for more where none waits. Opens none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import SpecError
from orchestrator.execution.patience import Patience
from orchestrator.execution.trials import Trials
from orchestrator.ledger.rows import TrialRow
from orchestrator.ledger.store import Ledger
from orchestrator.search.searcher import Searcher
from orchestrator.spec.cross_fields import resolved
from orchestrator.spec.sweep_spec import SweepSpec
from orchestrator.trial import Candidate, TrialState, config_hash, jsonable
from orchestrator.workload import Description, flatten


@dataclass
class Claims:
    """Of one sweep, for the command that drives it."""

    sweep_id: int
    spec: SweepSpec
    workload: Description
    searcher: Searcher
    ledger: Ledger
    trials: Trials
    patiently: Patience
    is_searched_out: bool = False

    def next(self) -> TrialRow | None:
        """A trial that waited and runs now; None when there is none now. Raises as `expand`."""
        if self.trials.one_is_alone:
            return None
        trial = self._claimed()
        while trial is None and not self.is_searched_out and self.expand():
            trial = self._claimed()
        return trial

    def expand(self) -> Sequence[TrialRow]:
        """Asks the searcher for more and writes what is new into the ledger, before anything trains.

        Raises SpecError for a trial that the workload refuses; the search is over then.
        """
        candidates = self.searcher.ask(self.trials.history())
        if candidates is None:
            self.is_searched_out = True
            return ()
        try:
            items = [self._item(candidate) for candidate in candidates]
        except SpecError:
            self.is_searched_out = True
            raise

        def add_again() -> Sequence[TrialRow]:
            self.ledger.add_trials(self.sweep_id, items)  # the first try may have added them
            return [row for row in self.ledger.trials(self.sweep_id) if row.number not in self.trials]

        rows = self.patiently(lambda: self.ledger.add_trials(self.sweep_id, items), add_again)
        self.trials.update((row.number, row) for row in rows)
        return rows

    def _item(self, candidate: Candidate) -> tuple[Candidate, dict[str, Any], str]:
        config = flatten(resolved(self.spec, self.workload.resolve, candidate.params))
        return candidate, {name: jsonable(value) for name, value in config.items()}, config_hash(candidate.params)

    def _claimed(self) -> TrialRow | None:
        if self.trials.must_wait:
            return None

        def claim_again() -> TrialRow | None:
            """A claim whose answer was lost has a trial running that nobody trains."""
            lost = [row for row in self.ledger.trials(self.sweep_id) if self._waits_for_us(row)]
            return min(lost, key=lambda row: row.number) if lost else self.ledger.claim(self.sweep_id)

        return self.patiently(lambda: self.ledger.claim(self.sweep_id), claim_again)

    def _waits_for_us(self, row: TrialRow) -> bool:
        ours = self.trials.get(row.number)
        return row.state is TrialState.RUNNING and ours is not None and ours.state is TrialState.WAITING
