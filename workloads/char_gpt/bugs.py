"""Planted bugs of a language model: each a part whose one line is wrong. Those of the update are in the engine.

Nothing here is used unless a sweep asks for it by name (`bug: ...`).
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from workloads.char_gpt.text import Text
from workloads.data.tokens import TokenBatch
from workloads.engine.bugs import TRAINERS
from workloads.layers.transformer import PositionEmbedding

Part = TypeVar("Part")


def plant(bug: str, part: type[Part]) -> type[Part]:
    """The part with the bug in it if that is where the bug is, otherwise the part itself."""
    planted = PLANTED.get(bug, part)
    return planted if issubclass(planted, part) else part


class UnshiftedText(Text):
    """The model is asked for the token it has just read: the training loss falls to nothing, the true one climbs."""

    def batch(self, indices_B: Tensor, noise: int) -> TokenBatch:
        batch = super().batch(indices_B, noise)
        return batch._replace(targets_BT=batch.tokens_BT)


class DetachedPositions(PositionEmbedding):
    """The table of positions is used and never trained."""

    def forward(self, num_positions: int) -> Tensor:
        return super().forward(num_positions).detach()


PLANTED: dict[str, type] = {
    **TRAINERS,
    "unshifted_targets": UnshiftedText,
    "detached_positions": DetachedPositions,
}
