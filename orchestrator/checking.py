"""Runs a workload's `check` in processes of its own: neither torch nor a crash reaches this one. Judges no finding.

Not a concurrent.futures pool: that cannot say whose check killed a worker, nor end one that hangs.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.trial import Finding, Params, Severity
from orchestrator.workload import Context, describe

if TYPE_CHECKING:  # loads the database's driver, which the process that only waits does not need
    from orchestrator.execution.job import Job

NUM_PROCESSES = 2  # each holds a model and a torch of its own
LIMIT_S = 120.0  # of one structure; a check is a few small batches, so one that takes longer hangs


@dataclass(frozen=True)
class Answer:
    """What the checks of one config found, and how long they took."""

    findings: tuple[Finding, ...]
    seconds: float


def run_checks(
    workload: str,
    configs: Sequence[Params],
    thresholds: Mapping[str, float],
    budget_s: float,
    limit_s: float = LIMIT_S,
) -> list[Answer | None]:
    """An answer for each of `configs`, in their order; None: not begun when `budget_s` was over.

    `workload` is a name that `describe` knows in any process. What ends a check's process, or keeps it from answering
    for `limit_s`, is a finding `check_failed`.
    """
    answers: list[Answer | None] = [None] * len(configs)
    waiting = deque(enumerate(configs))
    idle: list[_Process] = []
    busy: dict[Connection, tuple[int, _Process]] = {}
    num_processes = min(NUM_PROCESSES, os.cpu_count() or 1)
    deadline = time.monotonic() + budget_s
    folder = tempfile.TemporaryDirectory(prefix="orch-check-")  # ours: a process that is ended cleans up nothing
    try:
        while busy or (waiting and time.monotonic() < deadline):
            while waiting and len(busy) < num_processes and time.monotonic() < deadline:
                process = idle.pop() if idle else _Process()
                index, params = waiting.popleft()
                process.ask(workload, params, thresholds, str(Path(folder.name, str(index), "artifacts")))
                busy[process.connection] = (index, process)
            if not busy:  # the time was over between the two looks at the clock
                break
            oldest = min(process.asked_at for _, process in busy.values())
            ready = set(wait(list(busy), timeout=max(0.0, oldest + limit_s - time.monotonic())))
            for connection, (index, process) in list(busy.items()):
                if connection in ready or process.seconds >= limit_s:
                    answers[index] = process.answer() if connection in ready else process.too_slow()
                    del busy[connection]
                    idle += [process] if process.is_alive else []
    finally:
        for process in (*idle, *(process for _, process in busy.values())):
            process.kill()
        folder.cleanup()
    return answers


class _Process:
    """A process that checks one config after another."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,))  # no daemon: those may have no children
        self._process.start()
        theirs.close()  # else its death would not end our waiting
        self.is_alive = True
        self.asked_at = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since it was asked."""
        return time.monotonic() - self.asked_at

    def ask(self, *question: Any) -> None:
        self.asked_at = time.monotonic()
        with suppress(BrokenPipeError):  # it died meanwhile: `answer` says so
            self.connection.send(question)

    def answer(self) -> Answer:
        """What it found; if it died, that it did."""
        try:
            answer: Answer = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(timeout=1.0)  # its end may take a moment longer than that of its connection
            self.kill()
            return Answer((_failed(f"its process died ({_ending(self._process.exitcode)})"),), self.seconds)
        return answer

    def too_slow(self) -> Answer:
        self.kill()
        return Answer((_failed(f"it had not ended after {self.seconds:.0f} s"),), self.seconds)

    def kill(self) -> None:
        self.is_alive = False
        self.connection.close()
        self._process.kill()
        self._process.join()


def _ending(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    return f"{name}: perhaps out of memory" if name == "SIGKILL" else name


def _serve(connection: Connection) -> None:
    """The life of a check's process: answers until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which then ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; there are as many of us as there are cores
    os.dup2(2, 1)  # what a workload prints must not get between a command's lines of JSON
    with suppress(EOFError, BrokenPipeError):
        while True:
            connection.send(_check(*connection.recv()))


def _end_with_parent() -> None:
    """Also in the middle of a check: the command may have been killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _check(name: str, params: Params, thresholds: Mapping[str, float], artifact_uri: str) -> Answer:
    """Never raises for what the workload does."""
    started, heard = time.monotonic(), _Heard()
    try:
        workload = describe(name)
        config, implementation = workload.resolve(params), workload.load()
        started = time.monotonic()  # what the first check of a process imports is not its cost
        context = _context(name, config, params, thresholds, artifact_uri, heard)
        for finding in implementation.check(config, context):  # type: ignore[attr-defined]  # see `has_checks`
            heard.findings.append(_plain(finding))
    except (Exception, SystemExit) as error:  # the boundary between the user's code and ours
        heard.findings.append(_failed(f"it raised {_told(error)}"))
    return Answer(tuple(heard.findings), time.monotonic() - started)


@dataclass
class _Heard:
    """The sink of a check: keeps its findings. Whatever else it says is said to nobody."""

    findings: list[Finding] = field(default_factory=list)
    stopping: bool = False

    def record(self, job: Job, step: int, timestamp_ms: int, metrics: Mapping[str, float]) -> None: ...

    def finding(self, job: Job, finding: Finding) -> None:
        self.findings.append(_plain(finding))

    def sync(self) -> None: ...


def _context(
    name: str, config: Any, params: Params, thresholds: Mapping[str, float], artifact_uri: str, sink: _Heard
) -> Context:
    """That of a first attempt at trial 0, on the CPU; its states and artifacts go where nobody looks."""
    from orchestrator.execution.job import Job
    from orchestrator.execution.trial_run import TrialContext
    from orchestrator.execution.verdict import Verdict

    job = Job(
        sweep_id=0,
        trial_id=0,
        number=0,
        attempt=1,
        run_id="",
        workload=name,
        params=params,
        metric="",
        stop_diverged=False,
        log_every=1,
        checkpoint_every=sys.maxsize,
        started_at_ms=0,
        artifact_uri=artifact_uri,
        thresholds=thresholds,
    )
    return TrialContext(job, sink, config, Verdict(job))


def _plain(finding: Finding) -> Finding:
    """With Python's own numbers: unpickling one of torch's would import torch over there."""

    def number(value: Any) -> float | None:
        return None if value is None else float(value)

    return replace(
        finding,
        severity=Severity(finding.severity),
        step=None if finding.step is None else int(finding.step),
        value=number(finding.value),
        threshold=number(finding.threshold),
    )


def _failed(why: str) -> Finding:
    return Finding("check_failed", Severity.WARNING, f"the check itself failed: {why}", "its trials were not checked")


def _told(error: BaseException) -> str:
    """`ValueError: no rows (my_lab.py:37)`, where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"
