"""What SIGINT, SIGTERM and SIGHUP do to a command: they interrupt it, as Ctrl-C does. Marks no trial, starts nothing.

A running sweep stops at the first one: trials save their state and end. The second ends the command and every process
that it started at once. A closed terminal says SIGHUP twice, the shell and the kernel, and must not cost the states:
SIGHUP is never the second one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

EXIT_CODE = 130
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
UNHEARD_S = 20  # Python swallows what is raised in its callbacks (fork hooks, __del__): such a command would go on
SAME_WORD_S = 0.25  # `timeout` and `make` signal their child and then its group: nobody has asked twice


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """All three raise KeyboardInterrupt; SIGHUP does not where it is ignored, as under nohup. For the main thread.

    Afterwards they are ignored: a command that has had its last word cannot be stopped any more, only be made to print
    the traceback of how it ends.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            let_go_of_terminal()
        signal.alarm(UNHEARD_S)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, lambda *_: end_at_once())
    try:
        with handled_by(interrupt):
            yield
    except Exception as error:
        if signal.alarm(0):  # what it interrupted has turned it into an error of its own
            raise KeyboardInterrupt from error
        raise
    finally:
        ignore()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def ignore() -> None:
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


class Signals:
    """The first signal asks a sweep to stop; the second ends this process and its children at once."""

    def __init__(self) -> None:
        self._interrupt: Callable[[], None] | None = None
        self._asked_at = 0.0
        self._handlers = contextlib.ExitStack()

    def arm(self, interrupt: Callable[[], None]) -> None:
        """From here on a signal calls `interrupt` and raises nothing. Call from the main thread."""
        self._interrupt = interrupt
        self._handlers.enter_context(handled_by(self._received))
        if signal.alarm(0):  # an earlier signal was swallowed
            self._received(signal.SIGINT, None)

    def _received(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            let_go_of_terminal()
        if self._interrupt is not None:
            interrupt, self._interrupt = self._interrupt, None
            self._asked_at = time.monotonic()
            interrupt()
        elif number != signal.SIGHUP and time.monotonic() - self._asked_at > SAME_WORD_S:
            end_at_once()

    def __enter__(self) -> Signals:
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.close()


@contextlib.contextmanager
def handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """All three call `handler`, SIGHUP unless it is ignored; the handlers of before are back at the end."""
    before: dict[int, Any] = {number: signal.getsignal(number) for number in STOPPING}
    handled = [number for number in STOPPING if number != signal.SIGHUP or before[number] != signal.SIG_IGN]
    for number in handled:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])


def let_go_of_terminal() -> None:
    """What is said from now on goes nowhere: writing to a closed terminal is an error, and nobody reads it."""
    silence(stream for stream in (0, 1, 2) if stat.S_ISCHR(os.fstat(stream).st_mode))  # a closed one is no tty any more


def silence(streams: Iterable[int]) -> None:
    """Has these descriptors lead nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in streams:
        os.dup2(nowhere, stream)
    os.close(nowhere)


def end_at_once(exit_code: int = EXIT_CODE) -> None:
    """Kills what this process started, then itself. Who is in a session of its own on purpose is no child of ours."""
    import psutil

    if os.isatty(1):
        os.write(1, b"\x1b[?25h\n")  # the live table hides the cursor
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    os._exit(exit_code)
