"""Counts what happened between two reports. Measures no model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from workloads.engine.update import Batch, Update


@dataclass
class Tally:
    """What happened since the last report, and what is counted from the start."""

    num_updates: int = 0
    num_clipped: int = 0
    num_valid: float = 0.0
    seconds: float = 0.0
    skipped_steps: int = 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started

    def add(self, update: Update, window: Sequence[Batch]) -> None:
        self.num_updates += 1
        self.num_clipped += update.clipped
        self.num_valid += sum(micro.num_valid for micro in window)
        self.skipped_steps += not update.applied

    def take(self) -> dict[str, float]:
        """The metrics of the interval that ends here; the next one starts."""
        metrics = {
            "grad/clipped_share": self.num_clipped / self.num_updates,
            "time/step_seconds": self.seconds / self.num_updates,
            "time/tokens_per_second": self.num_valid / self.seconds,
            "update/skipped_steps": float(self.skipped_steps),
        }
        self.num_updates, self.num_clipped, self.num_valid, self.seconds = 0, 0, 0.0, 0.0
        return metrics
