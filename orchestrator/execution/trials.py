"""What a command knows of the trials of its sweep: the ledger's rows, kept in step. Reads and writes no database."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from orchestrator.execution.job import Job
from orchestrator.ledger.rows import TrialRow
from orchestrator.trial import Outcome, Told, TrialState


class Trials(dict[int, TrialRow]):
    """By number. Progress, searching and what becomes of the sweep as a whole go by these."""

    def __init__(self, rows: Iterable[TrialRow], num_planned: int) -> None:
        """`num_planned`: how many there are when the search is through."""
        super().__init__((row.number, row) for row in rows)
        self.num_planned = num_planned
        self._alone = {number for number, row in self.items() if row.alone}

    def begun(self, job: Job) -> None:
        row = self[job.number]
        self[job.number] = replace(row, state=TrialState.RUNNING, run_id=job.run_id, attempts=job.attempt)

    def ended(self, number: int, outcome: Outcome, state: TrialState, alone: bool = False) -> None:
        """`state`: what the trial is in now. `alone`: from now on it trains while no other does."""
        row = self[number]
        said = row if outcome.last_step is None else outcome  # else it reported nothing new
        self[number] = replace(
            row,
            state=state,
            objective=said.objective,
            more_objectives=list(said.more_objectives),
            last_step=said.last_step,
            alone=row.alone or alone,
        )
        self._alone |= {number} if alone else set()

    def counts(self) -> Counter[TrialState]:
        return Counter(row.state for row in self.values())

    def history(self) -> list[Told]:
        """What a searcher is told: every trial so far, by number."""
        rows = sorted(self.values(), key=lambda row: row.number)
        return [
            Told(row.candidate, row.state, row.objective, tuple(row.more_objectives), row.last_step) for row in rows
        ]

    @property
    def running(self) -> list[int]:
        """Their numbers. For any thread."""
        return [number for number, row in list(self.items()) if row.state is TrialState.RUNNING]

    @property
    def are_over(self) -> bool:
        """A running one may come back for another attempt."""
        return all(row.state.is_over for row in self.values())

    @property
    def are_to_come(self) -> bool:
        """True if any will begin in this command, or end in it."""
        return not self.are_over or len(self) < self.num_planned

    @property
    def is_left(self) -> bool:
        """True if there is something to resume."""
        return any(row.state.is_unfinished for row in self.values()) or len(self) < self.num_planned

    @property
    def has_objective(self) -> bool:
        """True if one has reported all that the sweep asks for."""
        return any(None not in (row.objective, *row.more_objectives) for row in self.values())

    @property
    def one_is_alone(self) -> bool:
        """True while a trial runs beside which nobody trains."""
        return any(self[number].state is TrialState.RUNNING for number in self._alone)

    @property
    def must_wait(self) -> bool:
        """True while others run, if only trials are left that train alone."""
        if not self._alone:
            return False
        is_left = any(row.state is TrialState.WAITING and not row.alone for row in self.values())
        return not is_left and any(row.state is TrialState.RUNNING for row in self.values())
