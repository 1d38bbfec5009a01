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
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
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
        process = fork_server().Process(target=_orch_into_files, args=(list(arguments), folder, dict(env), out, err))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise TimeoutError(f"orch {' '.join(arguments)}: no end after {timeout_s} s; it said\n{err.read_text()}")
        return process.exitcode, out.read_text(), err.read_text()


class WarmProcess:
    """A command that runs, in a session of its own, with the handles of a `Popen` whose errors go to its output."""

    def __init__(self, arguments: Sequence[str], folder: Path, env: Mapping[str, str]) -> None:
        context = fork_server()
        output, said = context.Pipe(duplex=False)
        self._process = context.Process(target=_orch_in_a_session, args=(list(arguments), folder, dict(env), said))
        self._process.start()
        said.close()  # the command has it
        self.stdout = os.fdopen(os.dup(output.fileno()), encoding="utf-8")
        output.close()
        assert self._process.pid is not None
        self.args, self.pid = ["orch", *arguments], self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """What it has still to say, once it has ended. Raises TimeoutExpired; it then runs on."""
        rest: list[str] = []
        reader = threading.Thread(target=lambda: rest.append(self.stdout.read()), daemon=True)
        reader.start()
        reader.join(timeout)
        if reader.is_alive():
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(timeout)
        self.stdout.close()
        return rest[0], None

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _orch_in_a_session(arguments: list[str], folder: Path, env: dict[str, str], said: Connection) -> None:
    os.setsid()
    os.dup2(said.fileno(), 1)
    os.dup2(said.fileno(), 2)
    said.close()
    _orch(arguments, folder, env)


def _orch_into_files(arguments: list[str], folder: Path, env: dict[str, str], out: Path, err: Path) -> None:
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    _orch(arguments, folder, env)


def _orch(arguments: list[str], folder: Path, env: dict[str, str]) -> None:
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
