"""The mixture of experts as a block's feed-forward. Adds no loss.

Axes: B rows, T time, D model width, N tokens of a micro-batch (B * T).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from workloads.engine.precision import Precision
from workloads.layers.moe import MoE
from workloads.layers.router import Routing
from workloads.layers.transformer import INIT_STD, GPTShape
from workloads.moe_gpt.config import Config


class MoeFeedForward(nn.Module):
    """Takes the place of the dense feed-forward: every token of the micro-batch is one row to the experts."""

    def __init__(
        self, config: Config, shape: GPTShape, precision: Precision, renormalize: bool, source: torch.Generator
    ) -> None:
        super().__init__()
        hidden = config.expert_hidden or 4 * shape.width
        self.moe = MoE(
            shape.width,
            hidden,
            config.num_experts,
            config.k,
            renormalize,
            precision,
            source,
            config.capacity_factor,
        )
        start_as_gpt(self.moe, shape.std_out, source)

    # Queue lengths change with every batch: compiled, each would be a program of its own.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, hidden_BTD: Tensor, valid_BT: Tensor | None) -> tuple[Tensor, Routing]:
        valid_N = None if valid_BT is None else valid_BT.flatten()
        mixed_ND, routing = self.moe(hidden_BTD.flatten(0, 1), valid_B=valid_N)
        return mixed_ND.view_as(hidden_BTD), routing

    def blocks(self) -> Mapping[str, list[nn.Parameter]]:
        return {"router": list(self.moe.router.parameters()), "experts": list(self.moe.experts.parameters())}


@torch.no_grad()
def start_as_gpt(moe: MoE, std_out: float, source: torch.Generator) -> None:
    """The initial weights of a dense feed-forward, for every expert and the router."""
    experts = moe.experts
    for weight, std in (
        (moe.router.weight, INIT_STD),
        (experts.weight_in, INIT_STD),
        (experts.weight_out, std_out),
    ):
        weight.normal_(0.0, std, generator=source)
    for bias in (experts.bias_in, experts.bias_out):
        bias.zero_()
