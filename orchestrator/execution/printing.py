"""Keeps what a trial prints: whole lines, in order, bounded. Takes Python's streams, not the descriptors below them.

What a C library writes straight to a descriptor stays in the log of its process: in Ray's worker log, or on the
terminal under `--inline`. So does what a child process prints.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from orchestrator.execution.job import Job
from orchestrator.tracking.records import LogLine
from orchestrator.trial import storable

MAX_LINES = 2_000  # an attempt
MAX_BYTES = 1_000_000  # an attempt; of UTF-8
MAX_LINE_LENGTH = 4_000  # characters
GATHER_S = 0.05  # lines that are printed together travel together
STREAMS = ("stdout", "stderr")

Deliver = Callable[[Sequence[LogLine]], None]


@contextlib.contextmanager
def captured(job: Job, deliver: Deliver, sync: Callable[[], None], is_shown: bool = False) -> Iterator[None]:
    """While it is open, what this process prints is the attempt's. `is_shown`: it reaches the terminal as well.

    `deliver` is called from another thread, soon after something was printed; an error of its own is raised at the end.
    An attempt that printed ends with `sync`: its lines are then safe.
    """
    kept = Kept(job, deliver)
    try:
        with contextlib.ExitStack() as stack:
            for name in STREAMS:
                stack.enter_context(_route(name).leading_to(kept, is_shown))
            yield
    finally:
        has_printed = kept.close()
    if has_printed:
        sync()


class Kept:
    """The lines of one attempt, from any of its threads, on their way to the recorder."""

    def __init__(self, job: Job, deliver: Deliver) -> None:
        self._job, self._deliver = job, deliver
        self._state = threading.Condition()  # guards what follows
        self._begun = dict.fromkeys(STREAMS, "")  # what each stream's last, unfinished line holds
        self._waiting: list[LogLine] = []
        self._num_lines = self._num_bytes = 0
        self._num_left_out = 0
        self._is_closing = False
        self._failure: Exception | None = None
        self._carrier: threading.Thread | None = None  # an attempt that prints nothing has none

    def write(self, stream: str, text: str) -> None:
        with self._state:
            *whole, rest = (self._begun[stream] + text).split("\n")
            self._begun[stream] = _state_of(rest)[: 2 * MAX_LINE_LENGTH] if len(rest) > MAX_LINE_LENGTH else rest
            for line in whole:
                self._add(stream, line)

    def close(self) -> bool:
        """Delivers the rest; True if anything was printed. Raises what kept lines from being delivered."""
        with self._state:
            for stream, rest in self._begun.items():
                if _state_of(rest):
                    self._add(stream, rest)
            if self._num_left_out:
                self._take("stderr", f"[orch] {self._num_left_out} more lines were left out: {_bounds()}")
            self._is_closing = True
            self._state.notify_all()
        if self._carrier is None:
            return False
        self._carrier.join()
        if self._failure is not None:
            raise self._failure
        return True

    def _add(self, stream: str, line: str) -> None:
        if self._num_left_out or self._num_lines >= MAX_LINES or self._num_bytes >= MAX_BYTES:
            self._num_left_out += 1  # from the first one on: what is kept has no holes
            return
        text = storable(cut(_state_of(line)))
        self._num_bytes += len(text.encode())
        self._take(stream, text)

    def _take(self, stream: str, text: str) -> None:
        job = self._job
        owner = (job.sweep_id, job.trial_id, job.attempt)
        self._waiting.append(LogLine(*owner, stream, self._num_lines, text, int(time.time() * 1000)))
        self._num_lines += 1
        if self._carrier is None:
            self._carrier = threading.Thread(target=self._carry, name="orch-prints", daemon=True)
            self._carrier.start()
        self._state.notify_all()

    def _carry(self) -> None:
        while lines := self._next():
            try:
                self._deliver(lines)
            except Exception as error:  # raised by `close`
                self._failure = error
                return

    def _next(self) -> Sequence[LogLine]:
        """What waits, soon after something does; empty when there will be no more."""
        with self._state:
            self._state.wait_for(lambda: self._waiting or self._is_closing)
            self._state.wait_for(lambda: self._is_closing, GATHER_S)
            lines, self._waiting = self._waiting, []
            return lines


class Route:
    """A stream of this process: leads to the attempt that runs, or where it led before. Handlers may hold on to it."""

    def __init__(self, name: str, behind: TextIO) -> None:
        self._name, self._behind = name, behind
        self._kept: Kept | None = None
        self._is_shown = True
        os.register_at_fork(after_in_child=self._let_go)  # a child has no thread that delivers, nor the lock's owner

    @contextlib.contextmanager
    def leading_to(self, kept: Kept, is_shown: bool) -> Iterator[None]:
        self._behind = behind = getattr(sys, self._name)
        handlers = [handler for handler in logging.root.handlers if getattr(handler, "stream", None) is behind]
        self._is_shown, self._kept = is_shown, kept
        setattr(sys, self._name, self)
        for handler in handlers:
            handler.setStream(self)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            self._let_go()
            setattr(sys, self._name, behind)
            for handler in handlers:
                handler.setStream(behind)  # type: ignore[attr-defined]

    def write(self, text: str) -> int:
        kept = self._kept
        if kept is None or self._is_shown:
            self._behind.write(text)
        if kept is not None:
            kept.write(self._name, text)
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.write(line)

    def close(self) -> None:
        """Whoever closes sys.stdout closes what others still write to."""
        self.flush()

    def _let_go(self) -> None:
        self._kept = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)


@functools.cache
def _route(name: str) -> Route:
    """One a process: a logging handler that was made in an earlier trial then writes into the present one."""
    return Route(name, getattr(sys, name))


def _state_of(line: str) -> str:
    """What a terminal shows of a line: a progress bar goes back to the start and writes over itself."""
    return next((part for part in reversed(line.split("\r")) if part), "")


def cut(line: str) -> str:
    """The line as it is kept."""
    if len(line) <= MAX_LINE_LENGTH:
        return line
    return f"{line[:MAX_LINE_LENGTH]} [orch: {len(line) - MAX_LINE_LENGTH} more characters]"


def _bounds() -> str:
    return f"an attempt keeps {MAX_LINES} lines and {MAX_BYTES // 1_000_000} MB"
