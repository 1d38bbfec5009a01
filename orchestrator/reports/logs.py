"""What a sweep's command said and what its trials printed, as it is stored. Waits for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from orchestrator.errors import NotFound
from orchestrator.execution.chronicle import END
from orchestrator.ledger.models import SweepState
from orchestrator.reports.source import Query, sweep_facts
from orchestrator.reports.status import state_counts
from orchestrator.reports.table import Table
from orchestrator.trial import TrialState

COLUMNS = "sweep, trial, attempt, stream, line_number, line, written_at"
MAX_FAILED = 20  # that are told at the end


@dataclass(frozen=True)
class Line:
    """A stored line. Its place orders the lines of one trial, or of one sweep's commands."""

    attempt: int
    number: int
    text: str
    written_at: datetime

    @property
    def place(self) -> tuple[int, int]:
        return self.attempt, self.number


@dataclass(frozen=True)
class Log:
    """The lines of one trial (its number), or those that commands said of their sweep (`trial` None)."""

    query: Query
    sweep: str
    trial: int | None

    def newest(self, limit: int | None) -> list[Line]:
        """The last `limit` lines, the oldest of them first; None: all of them."""
        return self._lines("order by attempt desc, line_number desc limit %s", limit)[::-1]

    def after(self, place: tuple[int, int]) -> list[Line]:
        """Those behind a line."""
        return self._lines("and (attempt, line_number) > (%s, %s) order by attempt, line_number", *place)

    def table(self, limit: int | None) -> Table:
        """The last `limit` rows of the view, the oldest of them first."""
        text = f"select {COLUMNS} from orch.logs where {self._whose} order by attempt desc, line_number desc limit %s"
        columns, rows = self.query(text, (*self._owner, limit))
        return Table(columns, rows[::-1])

    def is_over(self) -> bool:
        """True when no command will say more: the sweep, or this trial of it, does not run."""
        _, [[state]] = self.query("select state from orch.sweeps where sweep = %s", (self.sweep,))
        return not SweepState(state).is_live or (self.trial is not None and self._state().is_over)

    def has_ended(self, lines: Sequence[Line]) -> bool:
        """True if a command's last word is among them; a trial has none."""
        return self.trial is None and any(line.text.startswith(END) for line in lines)

    def state_in_words(self) -> str:
        """`zloss is finished: 71 finished, 1 failed`, or `trial 3 of zloss is finished`."""
        if self.trial is not None:
            return f"trial {self.trial} of {self.sweep} is {self._state()}"
        _, [[state]] = self.query("select state from orch.sweeps where sweep = %s", (self.sweep,))
        counts = ", ".join(f"{count} {name}" for name, count in state_counts(self.query, self.sweep).items())
        return f"{self.sweep} is {state}: {counts}"

    def end(self) -> list[str]:
        """How it ended, where that is no good news: a trial's traceback, or the failed trials of the sweep."""
        if self.trial is None:
            failed = [f"trial {number} {state}: {why}" for number, state, why in self._failed()]
            if len(failed) > MAX_FAILED:
                failed[MAX_FAILED:] = [f"and {len(failed) - MAX_FAILED} more: orch status {self.sweep}"]
            return failed
        _, [[state, reason, error]] = self.query(
            "select state, reason, error from orch.runs where sweep = %s and trial = %s", self._owner
        )
        return error.rstrip().splitlines() if error else [f"trial {self.trial} {state}: {reason}"] if reason else []

    def _failed(self) -> list[tuple[int, str, str]]:
        _, rows = self.query(
            """
            select trial, state, coalesce(nullif(reason, ''), regexp_replace(rtrim(error, E'\\n'), E'^.*\\n', ''))
            from orch.runs where sweep = %s and state in ('failed', 'killed', 'lost') order by trial
            """,
            (self.sweep,),
        )
        return [(number, state, why) for number, state, why in rows]

    def _state(self) -> TrialState:
        _, [[state]] = self.query("select state from orch.runs where sweep = %s and trial = %s", self._owner)
        return TrialState(state)

    @property
    def _whose(self) -> str:
        return "sweep = %s and trial = %s" if self.trial is not None else "sweep = %s and trial is null"

    @property
    def _owner(self) -> tuple[str] | tuple[str, int]:
        return (self.sweep,) if self.trial is None else (self.sweep, self.trial)

    def _lines(self, rest: str, *parameters: int | None) -> list[Line]:
        text = f"select attempt, line_number, line, written_at from orch.logs where {self._whose} {rest}"
        _, rows = self.query(text, (*self._owner, *parameters))
        return [Line(*row) for row in rows]


def open_log(query: Query, sweep: str, trial: int | None) -> Log:
    """Raises NotFound, with the nearest, for an unknown sweep or trial."""
    sweep_facts(query, sweep)
    if trial is not None:
        _, [[last]] = query("select max(trial) from orch.runs where sweep = %s", (sweep,))
        if last is None or trial > last:
            known = "has no trials yet" if last is None else f"has trials 0 to {last}"
            raise NotFound(f"--trial  sweep {sweep!r} {known}, not {trial}")
    return Log(query, sweep, trial)
