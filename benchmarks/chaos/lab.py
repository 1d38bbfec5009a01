"""A home of its own, in which sweeps are started and looked at as a person does. Kills nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import psutil
import psycopg

from benchmarks.chaos.kills import Family, wait_for
from orchestrator.database import embedded
from orchestrator.settings import Home
from orchestrator.workspace import Workspace, open_workspace

ROOT = Path(__file__).parents[2]
FINISHES_WITHIN_S = 600.0
ENDS_WITHIN_S = 150.0  # after a signal: what a trial must save, and what the recorder has still to write
SWEEP = """
    workload: benchmarks.chaos.workload:Witnessed
    metric: {{name: train/loss, mode: min}}
    params:
      lr: {{grid: {lrs}}}
      seed: {{grid: {seeds}}}
      dropout: 0.1
      steps: {steps}
      pause_s: {pause_s}
      witness: {witness}
      depth: 1
      width: 16
      heads: 2
      context: 16
      batch_size: 8
      num_held_out_windows: 8
      eval_every: 50
    log_every: 1
    checkpoint_every: 10
    resources: {{cpu: 1, max_concurrent: {num_workers}}}
    retries: 1000
    preflight: false
"""
# The judge is asked at every report and stops nothing: where trials end must not depend on who was killed when.
JUDGED = "    scheduler: {{algorithm: median, max_steps: {steps}, grace_steps: {steps}}}\n"


@dataclass(frozen=True)
class Shape:
    """How large a sweep is."""

    lrs: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    steps: int = 200
    pause_s: float = 0.012
    num_workers: int = 2

    @property
    def num_trials(self) -> int:
        return len(self.lrs) * len(self.seeds)


@dataclass
class Command:
    """A running `orch sweep` in a session of its own."""

    process: subprocess.Popen[bytes]
    family: Family
    log: Path

    @property
    def has_ended(self) -> bool:
        self.family.look()
        return self.process.poll() is not None

    def wait(self, timeout_s: float) -> bool:
        return wait_for(lambda: self.has_ended, timeout_s)

    def last_words(self, num_lines: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])


@dataclass(frozen=True)
class Lab:
    """Where it all happens."""

    folder: Path
    workspace: Workspace
    shape: Shape

    @classmethod
    def open(cls, folder: Path, shape: Shape) -> Lab:
        return cls(folder, open_workspace(folder / ".orch"), shape)

    @property
    def home(self) -> Home:
        return self.workspace.home

    @property
    def journal(self) -> Path:
        return self.workspace.journal

    def witness(self, name: str) -> Path:
        return self.folder / f"{name}-witness"

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def write_sweep(self, name: str, is_judged: bool) -> Path:
        self.witness(name).mkdir(exist_ok=True)
        shape, path = self.shape, self.folder / f"{name}.yaml"
        values = {**asdict(shape), "lrs": list(shape.lrs), "seeds": list(shape.seeds), "witness": self.witness(name)}
        text = (SWEEP + (JUDGED if is_judged else "")).format(**values)
        path.write_text(textwrap.dedent(text))
        return path

    def start(self, file: Path, *more: str) -> Command:
        log = file.with_suffix(".log")
        with log.open("ab") as output:
            output.write(f"--- {time.strftime('%H:%M:%S')}\n".encode())
            output.flush()
            process = self._popen(["sweep", str(file), "--resume", *more], output)
        return Command(process, Family(psutil.Process(process.pid)), log)

    def wake_database(self) -> None:
        """What every command does first."""
        embedded.ensure_running(self.home)

    def status(self) -> tuple[int, str]:
        """What anybody does at 2 a.m.; reaps."""
        done = self._popen(["status"], subprocess.PIPE)
        said, _ = done.communicate(timeout=ENDS_WITHIN_S)
        return done.returncode, said.decode()

    def connect(self) -> psycopg.Connection[tuple[object, ...]]:
        return self.workspace.database.connect("orch chaos", autocommit=True)

    def close(self) -> None:
        embedded.stop(self.home)

    def _popen(self, arguments: list[str], output: IO[bytes] | int) -> subprocess.Popen[bytes]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ORCH_", "RAY_", "MLFLOW_"))}
        kept["OMP_NUM_THREADS"] = "1"  # as Ray sets it for its workers; sums depend on it
        env = {**kept, "ORCH_HOME": str(self.home.path), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "orchestrator.cli", *arguments]
        return subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
