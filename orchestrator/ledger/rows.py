"""What the ledger returns: frozen rows, with floats as they were before JSON had them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import RowMapping

from orchestrator.ledger.models import SweepState, Wish
from orchestrator.trial import Candidate, Finding, Params, TrialState

NOT_NUMBERS = ("Infinity", "-Infinity", "NaN")  # how JSON holds what it cannot hold


@dataclass(frozen=True)
class SweepRow:
    id: int
    name: str
    workload: str
    description: str
    spec: dict[str, Any]
    source: str
    columns: dict[str, str]  # field of the workload's Config -> SQL type, in the Config's order
    metric: str
    mode: str
    state: SweepState
    experiment_id: str | None
    tags: dict[str, str]
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    archived_at: datetime | None
    holder: str  # `<pid>@<host>`; empty: no command drives it
    holder_process: str
    heartbeat_at: datetime | None
    fence: int
    wanted: Wish


@dataclass(frozen=True)
class TrialRow:
    id: int
    sweep_id: int
    number: int
    params: dict[str, Any]
    config: dict[str, Any]
    config_hash: str
    cell: dict[str, Any]
    sample: int | None
    state: TrialState
    run_id: str | None
    diverged_at: int | None
    reason: str
    error: str
    objective: float | None
    more_objectives: list[float | None]
    last_step: int | None
    attempts: int
    started_at: datetime | None
    ended_at: datetime | None
    host: str
    device: str
    git_commit: str
    alone: bool

    @property
    def candidate(self) -> Candidate:
        return Candidate(params=self.params, cell=self.cell, sample=self.sample)


@dataclass(frozen=True)
class AttemptRow:
    id: int
    trial_id: int
    number: int
    state: TrialState
    started_at: datetime
    first_step: int
    ended_at: datetime | None
    host: str
    pid: int | None
    failure: str
    error: str
    seconds: float | None  # of training, where it was measured


@dataclass(frozen=True)
class FoundRow:
    """A finding about a trial."""

    id: int
    number: int  # of the trial
    finding: Finding


def restore_floats(values: Params, types: Mapping[str, str]) -> dict[str, Any]:
    """Undoes what JSON does to a float field: 1e16 comes back as an integer, an infinity as a text."""

    def restore(name: str, value: Any) -> Any:
        if types.get(name) != "double precision" or isinstance(value, bool):
            return value
        return float(value) if isinstance(value, int) or value in NOT_NUMBERS else value

    return {name: restore(name, value) for name, value in values.items()}


def sweep_row(row: RowMapping) -> SweepRow:
    columns = {field: sql_type for field, sql_type in row["columns"]}
    return SweepRow(**{**row, "columns": columns, "state": SweepState(row["state"]), "wanted": Wish(row["wanted"])})
