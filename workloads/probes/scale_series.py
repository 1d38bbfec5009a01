"""Tells from a loss scaler which updates it skipped: they never reach the optimiser. Sets no scale.

A fused optimiser is called at a skip too, and skips by itself: it has been told by a tensor, which is read at a look.
Of several optimisers under one scaler, a skip of another one's is told from this one's own where both take part in each
of the scaler's rounds; in a round without this one, a fall of the scale counts as its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

BY_HAND = 0.01  # of a factor's logarithm: a scale that moved by no power of the backoff factor was set by hand


@dataclass
class ScaleSeries:
    """`fates` are (scale, applied) of the updates since they were taken."""

    scaler: torch.amp.GradScaler
    optimizer: Optimizer
    num_skipped: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._fates: list[tuple[float | None, bool | Tensor]] = []
        self._before = self._state()
        self._round: Any = None  # what the scaler knew of its optimisers at this one's last step

    def _state(self) -> tuple[float, int]:
        """The scale, and how many updates have been applied since it last changed."""
        state = self.scaler.state_dict()
        return (state["scale"], state["_growth_tracker"]) if state else (1.0, 0)

    def skipped(self) -> int:
        """How many updates were skipped since this was asked last, none of which has reached the optimiser.

        `scaler.step` has waited for the device already, so that this waits for nothing new.
        """
        if not self.scaler.is_enabled() or getattr(self.optimizer, "_step_supports_amp_scaling", False):
            return 0
        before, self._before = self._before, self._state()
        grows = before[1] + 1 >= self.scaler.get_growth_interval()
        due = before[0] * (self.scaler.get_growth_factor() if grows else 1.0)
        scale, num = self._before[0], 0
        if scale < due and self._another_overflowed():
            due = before[0] * self.scaler.get_backoff_factor()
        if 0 < scale < due:
            backoffs = math.log(due / scale) / -math.log(self.scaler.get_backoff_factor())
            num = round(backoffs) if abs(backoffs - round(backoffs)) < BY_HAND else 0
        self._fates += [(due * self.scaler.get_backoff_factor() ** skip, False) for skip in range(num)]
        return num

    def _another_overflowed(self) -> bool:
        """True if the scale falls in the very round in which this optimiser has stepped: then for another's gradient.

        The scaler drops what it knows of a round at the end of it, and begins anew.
        """
        if self._round is None or self._round is self.scaler._per_optimizer_states:
            return False
        states, self._round = self._round.values(), None
        return any(bool(overflow) for state in states for overflow in state["found_inf_per_device"].values())

    def stepped(self) -> None:
        """The optimiser was called."""
        if self.scaler.is_enabled():
            self._round = self.scaler._per_optimizer_states
            overflow: Tensor | None = getattr(self.optimizer, "found_inf", None)
            self._fates.append((self._before[0], True) if overflow is None else (None, overflow))

    def take(self, step: int) -> list[tuple[int, float, bool]]:
        """(step, scale, applied) of each update up to this one."""
        fates, self._fates = self._fates, []
        now = self.scaler.get_scale() if fates else 1.0
        told = [(now if scale is None else scale, _applied(fate)) for scale, fate in fates]
        self.num_skipped += sum(not applied for _, applied in told)
        return [(step - len(told) + place, scale, applied) for place, (scale, applied) in enumerate(told, 1)]

    def was_unscaled(self) -> bool:
        """Asked in the optimiser's step: True if the scaler has had these gradients, or another optimiser's."""
        if not self.scaler.is_enabled() or hasattr(self.optimizer, "found_inf"):
            return True
        return any(state["found_inf_per_device"] for state in self.scaler._per_optimizer_states.values())


def _applied(fate: bool | Tensor) -> bool:
    return not bool(fate) if isinstance(fate, Tensor) else fate
