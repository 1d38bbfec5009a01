"""How long `orch --help` and `orch plan` take against the imports they cannot do without."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
ROUNDS = 15

HELP_PEER = "import click, pydantic"
PLAN_PEER = """
import click, ruamel.yaml, rich.table, pydantic_settings, pydantic
class Config(pydantic.BaseModel):
    lr: float = 1e-3
"""
ORCH = [sys.executable, "-c", "from orchestrator.cli import main; main()"]

Line = tuple[str, float, str, str, bool | None]


def seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return time.perf_counter() - started


def run() -> Iterator[Line]:
    pairs = {
        "orch --help / import click, pydantic": ([*ORCH, "--help"], [sys.executable, "-c", HELP_PEER], 2.5),
        "orch plan / click, ruamel.yaml, rich.table, pydantic_settings": (
            [*ORCH, "plan", "sweeps/zloss.yaml"],
            [sys.executable, "-c", PLAN_PEER],
            1.5,
        ),
    }
    for label, (ours, peer, limit) in pairs.items():
        times = [(seconds(ours), seconds(peer)) for _ in range(ROUNDS + 1)][1:]
        mine, theirs = median(one for one, _ in times), median(other for _, other in times)
        yield f"{label.split(' / ')[0]}, seconds", mine, "s", "", None
        yield label, mine / theirs, "x", f"<= {limit} x", mine / theirs <= limit
