"""What a trial has told its recorder and may have to tell again: a recorder that dies forgets what was not on disk.

Plain bookkeeping: sends nothing and waits for nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.tracking.recorder import Note, Points

Batch = tuple[list[Points], list[Note]]


@dataclass(frozen=True)
class Receipt:
    """A recorder's answer. Records are counted since its life began, those of all trials together."""

    life: str  # names the recorder's process: the next one knows only what this one brought to the disk
    num_given: int  # when it answered
    num_safe: int  # of these, on disk
    stopping: bool  # the sweep is being stopped


class Words:
    """The reports and notes of one attempt, in their order: some untold, some told and not known to be safe."""

    def __init__(self) -> None:
        self._points: list[Points] = []
        self._notes: list[Note] = []
        self._sent: Batch | None = None  # no answer yet
        self._told: deque[tuple[int, Batch]] = deque()  # what had been given when the recorder had it
        self._life = ""

    @property
    def num_untold(self) -> int:
        return len(self._points) + len(self._notes)

    @property
    def are_safe(self) -> bool:
        return not (self.num_untold or self._sent or self._told)

    def add(self, points: Iterable[Points] = (), notes: Iterable[Note] = ()) -> None:
        self._points.extend(points)
        self._notes.extend(notes)

    def next_batch(self) -> Batch:
        """Everything untold; sent from now on, until `heard` or `unheard`."""
        assert self._sent is None, "one batch at a time"
        self._sent, self._points, self._notes = (self._points, self._notes), [], []
        return self._sent

    def heard(self, receipt: Receipt) -> None:
        """The recorder has what was sent. A new life of it must hear again what its predecessor had not kept."""
        if self._life != receipt.life:
            self._tell_again()
            self._life = receipt.life
        if self._sent is not None:
            self._told.append((receipt.num_given, self._sent))
            self._sent = None
        while self._told and self._told[0][0] <= receipt.num_safe:
            self._told.popleft()

    def unheard(self) -> None:
        """The recorder died before it answered: nobody knows what it took. Saying things twice does no harm."""
        if self._sent is not None:
            self._told.append((0, self._sent))
            self._sent = None
        self._tell_again()

    def _tell_again(self) -> None:
        batches = [batch for _, batch in self._told]
        self._told.clear()
        self._points[:0] = [point for points, _ in batches for point in points]
        self._notes[:0] = [note for _, notes in batches for note in notes]
