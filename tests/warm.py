"""Runs `orch` in a process that is forked from one with all imports behind it. Tests no command as a shell starts it.

A cold `orch sweep --inline` of a toy spends two of its two and a half seconds importing MLflow. Everything else is as
if it had been typed: a process of its own with its own environment, folder, arguments, exit code and streams.
tests/acceptance types the same commands into a shell.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path

# What the commands import when they are called, but ray and torch: some of them must do without.
IMPORTED = [
    "orchestrator.cli.sweep", "orchestrator.cli.progress", "orchestrator.cli.sweep_end", "orchestrator.launch",
    "orchestrator.execution.inline", "orchestrator.removal", "orchestrator.doctor", "orchestrator.reports.runs",
    "orchestrator.reports.compare", "orchestrator.reports.status", "mlflow.store.tracking.sqlalchemy_store",
]  # fmt: skip


def fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def type_warm(arguments: Sequence[str], folder: Path, env: Mapping[str, str], timeout_s: float) -> tuple[int, str, str]:
    """Exit code (-n: killed by signal n), output and errors. Raises TimeoutError, after killing it."""
    with tempfile.TemporaryDirectory() as streams:
        out, err = Path(streams, "out"), Path(streams, "err")
        process = fork_server().Process(target=_orch, args=(list(arguments), folder, dict(env), out, err))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise TimeoutError(f"orch {' '.join(arguments)}: no end after {timeout_s} s; it said\n{err.read_text()}")
        return process.exitcode, out.read_text(), err.read_text()


def _orch(arguments: list[str], folder: Path, env: dict[str, str], out: Path, err: Path) -> None:
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.path[:0] = [str(folder), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = ["orch", *arguments]
    from orchestrator import cli, tracking

    importlib.reload(tracking)  # puts MLflow's switches into this environment, as its first import does
    try:
        cli.main()
    finally:
        atexit._run_exitfuncs()  # multiprocessing's own children run none
