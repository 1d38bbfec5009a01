"""What Ctrl-C and SIGTERM do to a running sweep."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

EXIT_CODE = 130


class Signals:
    """The first SIGINT or SIGTERM asks the sweep to stop; the second ends this process at once."""

    def __init__(self) -> None:
        self._before: dict[int, object] = {}
        self._interrupt: Callable[[], None] | None = None

    def arm(self, interrupt: Callable[[], None]) -> None:
        """Call from the main thread, after ray.init, which sets a SIGTERM handler of its own."""
        self._interrupt = interrupt
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._received)

    def _received(self, number: int, frame: FrameType | None) -> None:
        if self._interrupt is None:
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), b"\x1b[?25h\n")  # the live table hides the cursor
            os._exit(EXIT_CODE)
        interrupt, self._interrupt = self._interrupt, None
        interrupt()

    def __enter__(self) -> Signals:
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
