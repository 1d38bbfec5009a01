"""Keeps the losses that a loop hands over, each with its update. Judges none.

A loss belongs to the update whose backward pass came last before it was handed over, or comes next: it may be handed
over before its backward pass, after it, or after the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from statistics import fmean
from typing import Any

import torch
from torch import Tensor


@dataclass
class HandedLosses:
    """`counted` are the gradients that reached losses, each with the backward pass it came in; heard where asked."""

    guarded: Callable[[Callable[[], None]], None]
    waiting: list[tuple[int, Tensor | float]] = field(init=False, default_factory=list)
    counted: list[tuple[int, Tensor]] = field(init=False, default_factory=list)
    is_early: bool | None = field(init=False, default=None)  # the loop's habit: before the backward pass
    is_late: bool = field(init=False, default=False)  # after the step

    def hand(self, loss: Tensor | float, step: int, has_stepped: bool, ran_back: bool) -> None:
        """`step` updates are over; `has_stepped` in this watch, and `ran_back` says a backward pass since the last.

        With neither a backward pass nor a habit, a loss comes after its step.
        """
        if self.is_early is None:
            self.is_early = not has_stepped and not ran_back
        comes = ran_back or self.is_early or not has_stepped
        self.is_late |= not comes
        value = loss.detach().clone() if isinstance(loss, Tensor) else float(loss)  # `loss /= n` may follow
        self.waiting.append((step + comes, value))

    def hear(self, loss: Any) -> None:
        """Listens to what the loss will count in the gradient; nothing comes of one that was handed over too late."""
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss.register_hook(lambda gradient: self.guarded(lambda: self._reached(gradient)))  # type: ignore[no-untyped-call]

    def _reached(self, gradient: Tensor) -> None:
        self.counted.append((torch._C._current_graph_task_id(), gradient.detach()))

    def take(self, step: int, is_over: bool = False) -> list[tuple[int, float]]:
        """(update, mean over its micro-batches) of each that is over after `step`: one that comes late is not yet."""
        last = step + 1 if is_over else step - self.is_late
        over = [(update, float(loss)) for update, loss in self.waiting if update <= last]
        self.waiting = [(update, loss) for update, loss in self.waiting if update > last]
        return [(update, fmean(loss for _, loss in pairs)) for update, pairs in groupby(over, key=lambda pair: pair[0])]

    def take_counted(self, scale: float) -> list[tuple[int, float]]:
        """(backward pass, what a loss counted in it), the loss scale taken out.

        Several losses of one backward pass are parts of one loss: what each counts is the loop's own matter.
        """
        counted, self.counted = self.counted, []
        values = torch.stack([gradient.double().cpu() for _, gradient in counted]).tolist() if counted else []
        passes = [number for number, _ in counted]
        pairs = zip(passes, values, strict=True)
        return [(number, value / scale) for number, value in pairs if passes.count(number) == 1]


@dataclass
class Pace:
    """Time and tokens from look to look, by the clock, whatever the loop does besides; the first ends a warm-up."""

    num_tokens: Tensor | float = 0
    looked_at: tuple[float, int] | None = None

    def count(self, num_tokens: Tensor | float) -> None:
        """A tensor's value is read at the look: a GPU is not waited for."""
        self.num_tokens = self.num_tokens + (num_tokens.detach() if isinstance(num_tokens, Tensor) else num_tokens)

    def taken(self, step: int) -> dict[str, float]:
        before, self.looked_at = self.looked_at, (time.perf_counter(), step)
        num_tokens, self.num_tokens = float(self.num_tokens), 0
        if before is None or step <= before[1]:
            return {}
        seconds = self.looked_at[0] - before[0]
        pace = {"time/step_seconds": seconds / (step - before[1])}
        return {**pace, "time/tokens_per_second": num_tokens / seconds} if num_tokens else pace
