"""How long a person waits for the preflight of each shipped sweep that is checked before it trains.

The whole of it: processes that are started for it, imports in them, every structure. What it finds is not judged here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from orchestrator.planning import read_spec
from orchestrator.preflight import has_checks, preflight
from orchestrator.workload import describe

SWEEPS = Path(__file__).parents[1] / "sweeps"
LIMIT_S = 20.0  # on two cores

Line = tuple[str, float, str, str, bool | None]


def checked_sweeps() -> list[Path]:
    specs = {path: read_spec(path, (), None) for path in sorted(SWEEPS.glob("*.yaml"))}
    return [path for path, spec in specs.items() if spec.preflight and has_checks(describe(spec.workload))]


def run() -> Iterator[Line]:
    for path in checked_sweeps():
        result = preflight(read_spec(path, (), None), lambda text: None)
        label = f"{path.stem}, {len(result.answers)} structures"
        yield label, result.seconds, "s", f"<= {LIMIT_S:g} s", result.is_whole and result.seconds <= LIMIT_S
