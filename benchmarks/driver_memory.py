"""The driver's memory does not grow with the number of reports: they do not pass through it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from benchmarks.orchestration import LAB, Line, _orch_down

LIMIT_MB = 50.0


def run() -> Iterator[Line]:
    with tempfile.TemporaryDirectory(prefix="orch-bench-") as home:
        command = [sys.executable, "-m", "benchmarks.orchestration", "memory", home]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(LAB), str(LAB.parents[1])])}
        done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
        _orch_down(home)
    growth_mb = json.loads(done.stdout.strip().split("\n")[-1])["bytes"] / 1e6
    yield "driver's growth over 10,000 reports of 5 metrics", growth_mb, "MB", "< 50 MB", growth_mb < LIMIT_MB
