"""Says which rows each update trains on, and where in the data it is. Holds no rows.

A window is the micro-batches of one update. Which rows a window holds depends on their number only, not on how they are
split: (batch 128, accumulation 2) sees the rows of (batch 256, accumulation 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor


class Windows:
    """An endless series of windows over rows 0 .. num_rows-1."""

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        accumulation_steps: int,
        order: Literal["replacement", "epochs"],
        source: torch.Generator,
    ) -> None:
        self.num_rows, self.batch_size, self.accumulation_steps = num_rows, batch_size, accumulation_steps
        self.order, self.source = order, source
        self._epoch_N = torch.empty(0, dtype=torch.int64)  # what is left of the epoch, in order

    def draw(self) -> tuple[Tensor, ...]:
        """The row indices of the next window, one tensor a micro-batch. No micro-batch is empty."""
        count = self.batch_size * self.accumulation_steps
        if self.order == "replacement":
            indices = torch.randint(self.num_rows, (count,), generator=self.source)
        else:
            if len(self._epoch_N) == 0:
                self._epoch_N = torch.randperm(self.num_rows, generator=self.source)
            indices, self._epoch_N = self._epoch_N[:count], self._epoch_N[count:]
        return torch.split(indices, self.batch_size)

    def state_dict(self) -> dict[str, Any]:
        return {"source": self.source.get_state(), "epoch": self._epoch_N.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.source.set_state(state["source"])
        self._epoch_N = state["epoch"]
