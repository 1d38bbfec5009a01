"""Planted bugs of a router: each a model whose one line is wrong. The other bugs are those of `char_gpt`.

Nothing here is used unless a sweep asks for it by name (`bug: ...`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from workloads.engine.precision import Precision
from workloads.layers.router import Routing, router_z_loss
from workloads.moe_gpt.config import Config
from workloads.moe_gpt.language import MoeLanguageModel


class Bf16Router(MoeLanguageModel):
    """The config promises a float32 router; its logits are rounded to bf16 all the same."""

    def precision(self, config: Config) -> Precision:
        return replace(super().precision(config), router_logits=torch.bfloat16)


class RenormalizedTop1(MoeLanguageModel):
    """The one weight of each token is 1, whatever the router says: the task teaches it nothing."""

    def renormalize(self, config: Config) -> bool:
        return True


class DoubleCountedLoad(MoeLanguageModel):
    """The recomputation under activation checkpointing counts once more: twice the load, and so twice alpha."""

    def counted(self, num_assignments: Tensor) -> Tensor:
        return 2 * num_assignments


class PaddingInZ(MoeLanguageModel):
    """The mean of the z-loss counts padding."""

    def z_loss(self, routing: Routing) -> Tensor:
        return router_z_loss(routing.logits_BE)


PLANTED: dict[str, type[MoeLanguageModel]] = {
    "bf16_router": Bf16Router,
    "renormalized_top1": RenormalizedTop1,
    "double_counted_load": DoubleCountedLoad,
    "padding_in_z": PaddingInZ,
}
