"""A mixture-of-experts layer: a router and E small two-layer networks. Chooses dtypes by its policy, never by autocast.

Axes: B tokens of a batch, D model width, H hidden width, E experts, K chosen experts of a token, C places of an expert.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.engine.precision import Precision
from workloads.engine.random import uniform_parameter
from workloads.engine.update import Scalar
from workloads.layers.router import Router, Routing, expert_capacity, route

Dispatch = Literal["padded", "dense"]


class Experts(nn.Module):
    """E networks Linear-GELU-Linear (exact GELU), their weights stacked; each starts as torch.nn.Linear does."""

    def __init__(self, num_experts: int, width: int, hidden: int, source: torch.Generator) -> None:
        super().__init__()
        self.weight_in = uniform_parameter((num_experts, width, hidden), width, source)
        self.bias_in = uniform_parameter((num_experts, 1, hidden), width, source)
        self.weight_out = uniform_parameter((num_experts, hidden, width), hidden, source)
        self.bias_out = uniform_parameter((num_experts, 1, width), hidden, source)

    def forward(self, inputs_ECD: Tensor) -> Tensor:
        """Expert e applied to its C rows; computes in the dtype of the inputs."""
        dtype = inputs_ECD.dtype
        hidden_ECH = torch.baddbmm(self.bias_in.to(dtype), inputs_ECD, self.weight_in.to(dtype))
        return torch.baddbmm(self.bias_out.to(dtype), F.gelu(hidden_ECH), self.weight_out.to(dtype))


class MoE(nn.Module):
    """Router, experts and their weighted sum.

    `dispatch` says how tokens reach experts; both ways give the same numbers. "padded" copies each token to the C
    places of its expert and is the fast one; "dense" runs every expert on every token and works under vmap, where C
    may not depend on the data. The capacity holds in training only: evaluation drops no token.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        num_experts: int,
        k: int,
        renormalize: bool,
        precision: Precision,
        source: torch.Generator,
        capacity_factor: float | None = None,
        learnable_offset: bool = False,
        dispatch: Dispatch = "padded",
    ) -> None:
        super().__init__()
        self.router = Router(width, num_experts, learnable_offset, source)
        self.experts = Experts(num_experts, width, hidden, source)
        self.num_experts, self.k, self.renormalize = num_experts, k, renormalize
        self.precision, self.capacity_factor, self.dispatch = precision, capacity_factor, dispatch

    def forward(self, hidden_BD: Tensor, offset: Scalar = 0.0) -> tuple[Tensor, Routing]:
        """The mixed output [B, D] in the policy's compute dtype, and the routing that made it."""
        logits_BE = self.router(hidden_BD, offset, self.precision)
        capacity = self._capacity(len(hidden_BD))
        routing = route(logits_BE, self.k, self.renormalize, self.precision.router_softmax, capacity)
        run = run_padded if self.dispatch == "padded" else run_dense
        return run(self.experts, hidden_BD.to(self.precision.compute), routing), routing

    def _capacity(self, num_tokens: int) -> int | None:
        if not self.training:
            return None
        return expert_capacity(num_tokens, self.k, self.num_experts, self.capacity_factor)


def run_padded(experts: Experts, hidden_BD: Tensor, routing: Routing) -> Tensor:
    """Each expert computes as many rows as the fullest one has; an assignment without a place gives zeros."""
    num_experts, k = routing.logits_BE.shape[-1], routing.experts_BK.shape[-1]
    num_places = int(torch.where(routing.kept_BK, routing.places_BK, 0).max()) + 1
    slots = torch.where(routing.kept_BK, routing.experts_BK * num_places + routing.places_BK, num_experts * num_places)
    slots = slots.reshape(-1)
    copies = hidden_BD.unsqueeze(1).expand(-1, k, -1).reshape(len(slots), -1)
    # One row more than there are places: what is dropped lands there, and its output stays zero.
    rows = hidden_BD.new_zeros(num_experts * num_places + 1, hidden_BD.shape[-1]).index_copy(0, slots, copies)
    outputs_ECD: Tensor = experts(rows[:-1].view(num_experts, num_places, -1))
    outputs = F.pad(outputs_ECD.flatten(0, 1), (0, 0, 0, 1)).index_select(0, slots)
    return (outputs.view(-1, k, hidden_BD.shape[-1]) * routing.weights_BK.to(outputs.dtype).unsqueeze(-1)).sum(1)


def run_dense(experts: Experts, hidden_BD: Tensor, routing: Routing) -> Tensor:
    """Every expert computes every token; those not chosen, or full, get weight 0."""
    outputs_EBD: Tensor = experts(hidden_BD.unsqueeze(0).expand(routing.logits_BE.shape[-1], -1, -1))
    weights_BK = (routing.weights_BK * routing.kept_BK).to(hidden_BD.dtype)
    gates_BE = torch.zeros_like(routing.probabilities_BE, dtype=hidden_BD.dtype).scatter(
        -1, routing.experts_BK, weights_BK
    )
    return (outputs_EBD * gates_BE.t().unsqueeze(-1)).sum(0)
