"""Runs a workload's `check` in processes of its own: neither torch nor a crash reaches this one. Judges no finding.

Not a concurrent.futures pool: that cannot say whose check killed a worker, nor end one that hangs.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.trial import Finding, Params, Severity, as_finding, line_of, told
from orchestrator.workload import describe, stream_seed

if TYPE_CHECKING:  # the process that only waits need not load it
    import numpy as np

NUM_PROCESSES = 2  # each holds a model and a torch of its own
LIMIT_S = 120.0  # of one structure; a check is a few small batches, so one that takes longer hangs
SLOW_S = 10.0  # as long as nobody wonders
CHECK = re.compile(r"check|check_\w+|own_checks")  # what functions that check are called


@dataclass(frozen=True)
class Answer:
    """What the checks of one config found, and how long they took. `failed`: they did not come to their end."""

    findings: tuple[Finding, ...]
    seconds: float
    failed: bool = False


def run_checks(
    workload: str,
    configs: Sequence[Params],
    thresholds: Mapping[str, float],
    budget_s: float,
    limit_s: float = LIMIT_S,
    slow: Callable[[int, str], None] = lambda index, where: None,
    slow_s: float = SLOW_S,
) -> list[Answer | None]:
    """An answer for each of `configs`, in their order; None: not begun when `budget_s` was over.

    `workload` is a name that `describe` knows in any process. What ends a check's process, or keeps it from answering
    for `limit_s`, is a finding `check_failed`. `slow` is told which config has not answered for `slow_s`, and where
    its check is.
    """
    answers: list[Answer | None] = [None] * len(configs)
    waiting = deque(enumerate(configs))
    idle: list[_Process] = []
    busy: dict[int, _Process] = {}
    num_processes = min(NUM_PROCESSES, os.cpu_count() or 1)
    deadline = time.monotonic() + budget_s
    try:
        while busy or (waiting and time.monotonic() < deadline):
            while waiting and len(busy) < num_processes and time.monotonic() < deadline:
                process = idle.pop() if idle else _Process(slow_s)
                index, params = waiting.popleft()
                process.ask(workload, params, thresholds)
                busy[index] = process
            if not busy:  # the time was over between the two looks at the clock
                break
            for index, heard in _next_words(busy, limit_s):
                if isinstance(heard, str):
                    slow(index, heard)
                    continue
                answers[index], process = heard, busy.pop(index)
                idle += [process] if process.is_alive else []
    finally:
        left = (*idle, *busy.values())
        for process in left:
            process.kill()
        for process in left:  # only now: a second Ctrl-C may come while we wait
            process.join()
    return answers


def _next_words(busy: Mapping[int, _Process], limit_s: float) -> Iterator[tuple[int, Answer | str]]:
    """Waits until one of the processes says something or has had its time; then what each such one has to say."""
    oldest = min(process.asked_at for process in busy.values())
    connections = [process.connection for process in busy.values()]
    ready = set(wait(connections, timeout=max(0.0, oldest + limit_s - time.monotonic())))
    for index, process in list(busy.items()):
        if process.connection in ready:
            yield index, process.hear()
        elif process.seconds >= limit_s:
            yield index, process.too_slow()


class _Process:
    """A process that checks one config after another."""

    def __init__(self, slow_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, slow_s))  # no daemon: those may have no children
        self._process.start()
        theirs.close()  # else its death would not end our waiting
        self.is_alive = True
        self.asked_at = time.monotonic()
        self._where = ""

    @property
    def seconds(self) -> float:
        """Since it was asked."""
        return time.monotonic() - self.asked_at

    def ask(self, *question: Any) -> None:
        self.asked_at, self._where = time.monotonic(), ""
        with suppress(BrokenPipeError):  # it died meanwhile: `hear` says so
            self.connection.send(question)

    def hear(self) -> Answer | str:
        """What it found, or where it is, being slow; if it died, that it did."""
        try:
            heard: Answer | str = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(timeout=1.0)  # its end may take a moment longer than that of its connection
            self.kill()
            self.join()
            return self._lost(f"its process died ({ending_in_words(self._process.exitcode)})")
        if isinstance(heard, str):
            self._where = f", in {heard}"
        return heard

    def too_slow(self) -> Answer:
        self.kill()
        return self._lost(f"it had not ended after {self.seconds:.0f} s{self._where}")

    def _lost(self, why: str) -> Answer:
        return Answer((_failed(why),), self.seconds, failed=True)

    def kill(self) -> None:
        self.is_alive = False
        self.connection.close()
        self._process.kill()

    def join(self) -> None:
        """Waits for its end, which `kill` does not."""
        self._process.join()


def ending_in_words(exit_code: int | None) -> str:
    """`exit code 3`, or the signal that ended a process."""
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    return f"{name}: perhaps out of memory" if name == "SIGKILL" else name


def _serve(connection: Connection, slow_s: float) -> None:
    """The life of a check's process: answers until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which then ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; there are as many of us as there are cores
    os.dup2(2, 1)  # what a workload prints must not get between a command's lines of JSON
    with suppress(EOFError, BrokenPipeError):
        while True:
            question = connection.recv()
            timer = threading.Timer(slow_s, _tell_where, (connection, threading.get_ident()))
            timer.daemon = True
            timer.start()
            answer = _check(*question)
            timer.cancel()
            timer.join()  # two that send at once would garble what they say
            connection.send(answer)


def _end_with_parent() -> None:
    """Also in the middle of a check: the command may have been killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _tell_where(connection: Connection, thread: int) -> None:
    with suppress(OSError):  # nobody listens any more
        connection.send(_where(thread))


def _where(thread: int) -> str:
    """`check_cleared (my_lab.py:37)`: which check a thread is in, and at which line."""
    frames = traceback.extract_stack(sys._current_frames()[thread])
    names = [frame.name for frame in frames if CHECK.fullmatch(frame.name)]
    return f"{names[-1] if names else 'what comes before its checks'} ({line_of(frames[-1])})"


def _check(name: str, params: Params, thresholds: Mapping[str, float]) -> Answer:
    """Never raises for what the workload does."""
    started, findings, failed = time.monotonic(), list[Finding](), False
    try:
        workload = describe(name)
        config, implementation = workload.resolve(params), workload.load()
        started = time.monotonic()  # what the first check of a process imports is not its cost
        context = _Context(int(getattr(config, "seed", 0)), thresholds, findings)
        for finding in implementation.check(config, context):  # type: ignore[attr-defined]  # see `has_checks`
            context.finding(finding)
    except (Exception, SystemExit) as error:  # the boundary between the user's code and ours
        failed = True
        findings.append(_failed(f"it raised {told(error)}"))
    return Answer(tuple(findings), time.monotonic() - started, failed)


@dataclass
class _Shelf:
    """A trial's saved state as far as its checks want one: the process may be killed and leaves nothing behind."""

    state: bytes | None = None
    is_kept: bool = False

    def load(self) -> bytes | None:
        return self.state

    def due(self, step: int) -> bool:
        return False

    def save(self, step: int, state: bytes) -> None:
        self.state = state


@dataclass
class _Context:
    """What a check may ask, as the first attempt at trial 0 on the CPU: see `orchestrator.workload.Context`."""

    trial_seed: int
    thresholds: Mapping[str, float]
    findings: list[Finding]
    trial: int = 0
    attempt: int = 1
    device: str = "cpu"
    gpu_share: float = 0.0
    stopping: bool = False
    checkpoint: _Shelf = field(default_factory=_Shelf)

    def should_report(self, step: int) -> bool:
        return True

    def seed(self, stream: str) -> int:
        return stream_seed(self.trial_seed, stream)

    def generator(self, stream: str) -> np.random.Generator:
        import numpy as np

        return np.random.default_rng(self.seed(stream))

    def finding(self, finding: Finding) -> None:
        self.findings.append(as_finding(finding))

    def artifact(self, path: Path, name: str | None = None) -> None:
        """There is no run to store it with."""


def _failed(why: str) -> Finding:
    return Finding("check_failed", Severity.WARNING, f"the check itself failed: {why}", "its trials were not checked")
