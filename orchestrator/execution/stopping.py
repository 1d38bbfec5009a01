"""How long a sweep that was told to stop waits for its trials. Ends no process itself: says when it is time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

REMARK_S = 10.0
ANSWER_S = 60.0  # for a report and for saving a state
KILL_S = 30.0  # for a backend to end the workers of trials that have not answered
POLL_S = 0.5
MAX_NAMED = 5


class Stoppable(Protocol):
    """The sweep that is waited for."""

    interrupted: bool
    overdue: bool  # set here: what still runs has had its time

    @property
    def running(self) -> Sequence[int]:
        """The trials that run, by number."""


@contextlib.contextmanager
def never_stuck(
    run: Stoppable, say: Callable[[str], None], end: Callable[[str], None], can_end_workers: bool
) -> Iterator[None]:
    """While it is open, a sweep that was told to stop does so in time: trials that do not answer hold nobody for ever.

    `say` and `end` are called from another thread. `end` does not return; it is for what hangs without workers too.
    """
    is_over = threading.Event()

    def watch() -> None:
        while not run.interrupted:  # polled: a signal's handler must wait for no lock
            if is_over.wait(POLL_S):
                return
        if is_over.wait(REMARK_S):
            return
        if run.running:
            say(f"still waiting for {_named(run.running)}; ended {ANSWER_S:g} s after the signal, whatever is unsaved")
        if is_over.wait(ANSWER_S - REMARK_S):
            return
        run.overdue = True
        if not is_over.wait(KILL_S if can_end_workers else 0) and run.running:
            end(f"{_named(run.running)} did not stop within {ANSWER_S:g} s")

    threading.Thread(target=watch, name="orch-stopping", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _named(numbers: Sequence[int]) -> str:
    named = ", ".join(map(str, numbers[:MAX_NAMED]))
    more = f" and {len(numbers) - MAX_NAMED} more" if len(numbers) > MAX_NAMED else ""
    return f"trial{'s' if len(numbers) > 1 else ''} {named}{more}"
