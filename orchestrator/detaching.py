"""Starts a command that drives a sweep and leaves it alone: as a process of this host, or as a job of a Ray cluster.

Waits until the sweep is in the ledger and held, so that what the command refuses is heard here, with its exit code.
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator import background
from orchestrator.planning import SweepRequest
from orchestrator.reports.source import sweep_facts
from orchestrator.settings import Home
from orchestrator.workspace import find_home, open_workspace

HELD = b"\0"  # what a command writes into its pipe when it holds its sweep; before it come lines for the person
PIPE_BYTES = 1 << 16
TAKE_VALUE = ("--address", "--home")  # options that mean nothing elsewhere

Say = Callable[[str, bool], None]
"""(text, whether it is an error); the text has its line ends."""


@dataclass(frozen=True)
class Detached:
    """How it came out. `code` is None if the sweep runs; else the command has ended with it, and said why."""

    sweep: str
    where: str  # the process or job that drives it, in words
    code: int | None = None


def detach(request: SweepRequest, sweep: str, workload: str | None, arguments: Sequence[str], say: Say) -> Detached:
    """Starts `orch ARGUMENTS` for this sweep; these are the person's own, `--detach` among them.

    `workload` None: that of the stored sweep.

    Raises OrchError when nothing could be started. Whatever the command says until it holds the sweep is said here.
    """
    settings, home = find_home(request.home)
    arguments = [one for one in arguments if one != "--detach"]
    address = request.address or settings.ray_address
    if address and not request.inline:
        return _as_job(address, request, sweep, workload, arguments, say)
    return _as_process(home, sweep, arguments, say)


def _as_process(home: Home, sweep: str, arguments: Sequence[str], say: Say) -> Detached:
    log = background.log_file(home, "sweep-" + re.sub(r"\W", "_", sweep))
    ready, theirs = os.pipe()
    with os.fdopen(ready, "rb", buffering=0) as pipe:
        try:
            command = background.orch(*arguments, "--ready-fd", str(theirs))
            child, offset = background.spawn(command, log, os.environ, pass_fds=[theirs])
        finally:
            os.close(theirs)
        try:
            heard = _heard(pipe, say)
            code = None if heard is None else child.wait()
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
            child.wait()
            raise
    if code is not None:
        say(background.last_words(log, offset).removeprefix(heard or ""), code != 0)
    return Detached(sweep, f"process {child.pid}, whose output is in {log}", code)


def _heard(pipe: io.FileIO, say: Say) -> str | None:
    """Says what the command says of its way to the sweep. None once it holds it; else, when it ends, all it said."""
    heard = b""
    while text := pipe.read(PIPE_BYTES):
        said, held, _ = text.partition(HELD)
        say(said.decode(errors="replace"), False)
        if held:
            return None
        heard += said
    return heard.decode(errors="replace")


def _as_job(
    address: str, request: SweepRequest, sweep: str, workload: str | None, arguments: Sequence[str], say: Say
) -> Detached:
    """Submits the command to the cluster that has this address, with the file and the code it needs."""
    from orchestrator.execution.ray_tune import jobs
    from orchestrator.ledger.store import Ledger

    workspace = open_workspace(request.home)
    ledger = Ledger(workspace.database.engine("orch sweep"))
    before = ledger.find_sweep(sweep)
    spec = None if request.stored else request.spec

    def is_there() -> bool:
        now = ledger.find_sweep(sweep)
        return now is not None and bool(now.holder) and (before is None or now.fence > before.fence)

    workload = workload or sweep_facts(workspace.query, sweep).workload
    files = jobs.files_of(spec, workload.partition(":")[0].partition(".")[0])
    job = jobs.new_name()
    where = f"job {job} of the cluster at {address}"
    try:
        jobs.submit(address, job, _elsewhere(arguments, spec), files, workspace.identity)
        ended = jobs.wait_until(address, job, is_there)
    except KeyboardInterrupt:
        if jobs.stop(address, job):
            say(f"interrupted: {where} was stopped\n", True)
        raise
    if ended is not None:
        say(ended.said, ended.code != 0)
    return Detached(sweep, where, None if ended is None else ended.code)


def _elsewhere(arguments: Sequence[str], spec: Path | None) -> list[str]:
    """The arguments for another machine: the sweep file lies beside the command, home and address are its own."""
    words = iter(arguments)
    kept = []
    for word in words:
        if word in TAKE_VALUE:
            next(words)
        elif not word.startswith(tuple(f"{option}=" for option in TAKE_VALUE)):
            kept.append(spec.name if spec is not None and Path(word) == spec else word)
    return kept


def typed() -> list[str]:
    """What the person typed behind `orch`."""
    return sys.argv[1:]
