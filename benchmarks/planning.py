"""How long `orch plan` takes for ten thousand trials: reading, checking every combination, expanding, counting."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
ROUNDS = 5
LIMIT_S = 2.0

VALUES = ", ".join(f"{number}e-4" for number in range(1, 101))
SPECS = {
    "100 x 100 scalars": f"params: {{x: {{grid: [{VALUES}]}}, sleep_s: {{grid: [{VALUES}]}}, steps: 1}}\n",
    "100 samples x 100 seeds": "params: {x: {uniform: [0, 1]}, steps: 1}\nseeds: 100\n"
    "search: {algorithm: random, samples: 100}\n",
    "two conditions and an exclusion": f"params: {{x: {{grid: [{VALUES}]}}, sleep_s: {{grid: [{VALUES}]}},"
    " k: {grid: [1, 2]}, steps: 1}\nwhen: {k: {x: 1e-4}}\nexclude: [{x: 2e-4, sleep_s: 1e-4}]\n",
}

Line = tuple[str, float, str, str, bool | None]


def seconds(path: Path) -> float:
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", "from orchestrator.cli import main; main()", "plan", str(path)],
        cwd=ROOT / "tests" / "lab",
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        check=True,
        capture_output=True,
    )
    return time.perf_counter() - started


def run() -> Iterator[Line]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ten_thousand.yaml")
        for label, text in SPECS.items():
            path.write_text("workload: orch_lab:Trivial\nmetric: val/loss\n" + text)
            taken = median(seconds(path) for _ in range(ROUNDS))
            yield f"orch plan, 10,000 trials: {label}", taken, "s", f"<= {LIMIT_S:g} s", taken <= LIMIT_S
