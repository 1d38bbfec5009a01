"""Runs sweeps and reads them with the command `orch`, as a person would. Knows no figure and no table but the views."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.science.figure import Figure

ROOT = Path(__file__).parents[2]
ORCH = [sys.executable, "-m", "orchestrator.cli"]


@dataclass(frozen=True)
class SweepRun:
    """What one sweep of this repository has come to."""

    date: str  # UTC, of the last trial's end
    cpu_minutes: float  # of all trials together; each has one core
    trials: int
    diverged: int
    without_result: int


def run_sweep(sweep: str, *options: str) -> int:
    """Runs what is left of it and returns the exit code of `orch sweep`: 130 after Ctrl-C, which is its to handle."""
    command = [*ORCH, "sweep", str(sweep_file(sweep)), "--resume", *options]
    before = signal.signal(signal.SIGINT, _leave_it_to_orch)
    try:
        return subprocess.run(command).returncode
    finally:
        signal.signal(signal.SIGINT, before)


def _leave_it_to_orch(*_: object) -> None:
    """A handler and not SIG_IGN: that one would be inherited by the command."""


def sweep_file(sweep: str) -> Path:
    return ROOT / "sweeps" / f"{sweep}.yaml"


def describe_run(sweep: str) -> SweepRun:
    [row] = ask(
        "select to_char(max(ended_at) at time zone 'UTC', 'YYYY-MM-DD') as date, sum(seconds) / 60 as cpu_minutes,"
        " count(*) as trials, count(*) filter (where state = 'diverged') as diverged,"
        f" count(*) filter (where verdict is null) as without_result from runs where sweep = '{sweep}'"
    )
    return SweepRun(**row)


def measure(figures: Sequence[Figure]) -> list[list[float]]:
    """The numbers that each figure's query gives, all in one statement. An absent number is NaN."""
    selects = [
        f"select {index} as figure, value::double precision from ({figure.query}) as answer(value)"
        for index, figure in enumerate(figures)
        if figure.query
    ]
    values: list[list[float]] = [[] for _ in figures]
    for row in ask(" union all ".join(selects)) if selects else []:
        values[row["figure"]].append(_number(row["value"]))
    return values


def ask(query: str) -> list[dict[str, Any]]:
    """Rows of `orch sql`. Raises CalledProcessError, after its message has been shown, for a query it refuses."""
    done = subprocess.run([*ORCH, "sql", query, "--format", "json"], check=True, stdout=subprocess.PIPE, text=True)
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def _number(value: float | str | None) -> float:
    """NaN and infinity come as texts."""
    return float("nan") if value is None else float(value)
