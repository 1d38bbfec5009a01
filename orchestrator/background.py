"""Processes of ours that outlive the command that started them. Ends none but those that carry our mark.

A service writes `.orch/<name>.json` (0600) once it is ready: its addresses, and the mark that stands in its environment
and in that of all it started. A process is ours if it carries the mark: pids come again, and a file may be stale.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from orchestrator.errors import OrchError
from orchestrator.settings import Home

MARK = "ORCH_BACKGROUND"  # the variable that holds it
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.05
LOG_LIMIT_BYTES = 5_000_000  # a log that is longer at a start begins anew
LOG_TAIL_BYTES = 20_000


@dataclass(frozen=True)
class Service:
    """One that is ready: `facts` are its addresses and whatever else it said of itself."""

    pid: int
    mark: str
    facts: Mapping[str, Any]

    @property
    def is_up(self) -> bool:
        return _carries(self.pid, self.mark)


def find(home: Home, name: str) -> Service | None:
    """The service as its file has it, dead or alive; None without a file, or with one that no service has written."""
    try:
        said = json.loads(_file(home, name).read_text())
        return Service(said.pop("pid"), said.pop("mark"), said)
    except (FileNotFoundError, ValueError, AttributeError, KeyError, TypeError):
        return None


def announce(home: Home, name: str, facts: Mapping[str, Any]) -> None:
    """Called by a service that is ready; whole or not at all."""
    said = {"pid": os.getpid(), "mark": os.environ[MARK], **facts}
    draft = _file(home, name).with_suffix(f".{os.getpid()}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(said, file)
    os.replace(draft, _file(home, name))


def withdraw(home: Home, name: str) -> None:
    _file(home, name).unlink(missing_ok=True)


def start(home: Home, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Service:
    """Starts a service in a session of its own and waits until it is ready. Raises OrchError with its last words.

    What a dead one of that name has left is ended first: it may hold the ports.
    """
    stop(home, name)
    mark = secrets.token_hex(8)
    log = log_file(home, name)
    child, offset = spawn(command, log, {**(os.environ if environment is None else environment), MARK: mark})
    deadline = time.monotonic() + START_TIMEOUT_S
    try:
        while (service := find(home, name)) is None:
            if child.poll() is not None:
                raise OrchError(
                    last_words(log, offset).strip()
                    or f"{name} did not start (exit code {child.returncode}); read {log}"
                )
            if time.monotonic() > deadline:
                raise OrchError(f"{name} was not ready within {START_TIMEOUT_S:.0f} s; read {log}")
            time.sleep(POLL_S)
    except BaseException:
        end(mark)
        raise
    return service


def stop(home: Home, name: str) -> bool:
    """Ends the service and all it started, also what a dead one left. False if there was nothing to end."""
    service = find(home, name)
    was_there = service is not None and end(service.mark, first=service.pid)
    withdraw(home, name)
    return was_there


def end(mark: str, first: int | None = None) -> bool:
    """Ends every process that carries the mark: asks `first`, which may tidy up, then makes the rest."""
    family = list(_marked(mark))
    leaders = [process for process in family if process.pid == first] or family
    for ask, processes in ((psutil.Process.terminate, leaders), (psutil.Process.kill, None)):
        remaining = list(_marked(mark)) if processes is None else processes
        for process in remaining:
            with contextlib.suppress(psutil.NoSuchProcess):
                ask(process)
        psutil.wait_procs(remaining, timeout=STOP_TIMEOUT_S)
    return bool(family)


def spawn(
    command: Sequence[str], log: Path, environment: Mapping[str, str], pass_fds: Sequence[int] = ()
) -> tuple[subprocess.Popen[bytes], int]:
    """A process without a terminal, in a session of its own: it survives ours, and no Ctrl-C reaches it.

    Returns it with the place in `log`, in bytes, from which on its words stand there. It and all that write into the
    log hold the file: `is_free(log)` tells whether anybody does.
    """
    if log.exists() and log.stat().st_size > LOG_LIMIT_BYTES:
        os.truncate(log, 0)
    with open(os.open(log, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:  # a lock needs both on NFS
        fcntl.flock(output, fcntl.LOCK_SH)
        offset = os.fstat(output.fileno()).st_size
        child = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=pass_fds,
        )
        return child, offset


def orch(*arguments: str) -> list[str]:
    """The command line of `orch` with this Python. -P: the folder we are in must not shadow a module."""
    return [sys.executable, "-P", "-m", "orchestrator.cli", *arguments]


def log_file(home: Home, name: str) -> Path:
    return home.folder("logs") / f"{name}.log"


def last_words(log: Path, offset: int) -> str:
    """What stands at the end of the log, from `offset` on."""
    with log.open("rb") as file:
        file.seek(max(offset, log.stat().st_size - LOG_TAIL_BYTES))
        return file.read().decode(errors="replace")


def _file(home: Home, name: str) -> Path:
    return home.path / f"{name}.json"


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        if process.pid != os.getpid() and _carries(process.pid, mark):
            yield process


def _carries(pid: int, mark: str) -> bool:
    """True for a living process of ours with this mark."""
    try:
        process = psutil.Process(pid)
        return bool(process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark)
    except (psutil.NoSuchProcess, psutil.AccessDenied):  # gone, or somebody else's
        return False
