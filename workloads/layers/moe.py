"""A mixture-of-experts layer: a router and E small two-layer networks. Chooses dtypes by its policy, never by autocast.

Axes: B tokens of a batch, D model width, H hidden width, E experts, K chosen experts of a token, C places of an expert,
R rows that experts compute: places, or assignments sorted by expert.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.engine.precision import Precision
from workloads.engine.random import uniform_parameter
from workloads.engine.update import Scalar
from workloads.layers.router import Router, Routing, expert_capacity, route

Dispatch = Literal["queues", "dense"]

# How many of its places an expert may leave empty, on average, before it is faster to let each expert compute its own
# rows. In 16 bits more, and places come in multiples: there a product of a shape not seen before is compiled first,
# which takes 0.5 ms. Measured on one CPU core for D = 32 .. 256.
EMPTY_PLACES_WORTH_PADDING, EMPTY_PLACES_WORTH_PADDING_16_BIT = 20, 512
PLACES_STEP_16_BIT = 8


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
        weight_in, bias_in, weight_out, bias_out = self._weights(inputs_ECD.dtype)
        hidden_ECH = torch.baddbmm(bias_in, inputs_ECD, weight_in)
        return torch.baddbmm(bias_out, F.gelu(hidden_ECH), weight_out)

    def queues(self, inputs_RD: Tensor, lengths: list[int]) -> Tensor:
        """Expert e applied to the next lengths[e] rows; equal lengths are one batched product, and fast."""
        if len(set(lengths)) == 1:
            outputs_ECD: Tensor = self(inputs_RD.view(len(lengths), lengths[0], inputs_RD.shape[-1]))
            return outputs_ECD.flatten(0, 1)
        weight_in, bias_in, weight_out, bias_out = self._weights(inputs_RD.dtype)
        hidden_RH = F.gelu(_linear_one_by_one(inputs_RD, lengths, weight_in, bias_in))
        return _linear_one_by_one(hidden_RH, lengths, weight_out, bias_out)

    def _weights(self, dtype: torch.dtype) -> list[Tensor]:
        return [weight.to(dtype) for weight in (self.weight_in, self.bias_in, self.weight_out, self.bias_out)]


def _linear_one_by_one(inputs: Tensor, lengths: list[int], weights: Tensor, biases: Tensor) -> Tensor:
    slices = zip(inputs.split_with_sizes(lengths), weights.unbind(), biases.unbind(), strict=True)
    return torch.cat([torch.addmm(bias, rows, weight) for rows, weight, bias in slices])


class MoE(nn.Module):
    """Router, experts and their weighted sum.

    `dispatch` says how tokens reach experts; both ways give the same numbers. "queues" copies each token to a place of
    its expert and is the fast one; "dense" runs every expert on every token and works under vmap, where the number of
    places may not depend on the data. The capacity holds in training only: evaluation drops no token.
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
        dispatch: Dispatch = "queues",
    ) -> None:
        super().__init__()
        self.router = Router(width, num_experts, learnable_offset, source)
        self.experts = Experts(num_experts, width, hidden, source)
        self.num_experts, self.k, self.renormalize = num_experts, k, renormalize
        self.precision, self.capacity_factor, self.dispatch = precision, capacity_factor, dispatch

    def forward(self, hidden_BD: Tensor, offset: Scalar = 0.0, valid_B: Tensor | None = None) -> tuple[Tensor, Routing]:
        """The mixed output [B, D] in the policy's compute dtype, and the routing that made it.

        Padding, where `valid_B` is False, is not looked at, takes no place of an expert and gives zeros.
        """
        if valid_B is not None:
            hidden_BD = hidden_BD.where(valid_B.bool().unsqueeze(-1), 0.0)
        logits_BE = self.router(hidden_BD, offset, self.precision)
        with torch.autocast(hidden_BD.device.type, enabled=False):
            capacity = self._capacity(len(hidden_BD) if valid_B is None else valid_B.sum())
            routing = route(logits_BE, self.k, self.renormalize, self.precision.router_softmax, capacity, valid_B)
            run = run_queues if self.dispatch == "queues" else run_dense
            return run(self.experts, hidden_BD.to(self.precision.compute), routing), routing

    def _capacity(self, num_tokens: int | Tensor) -> int | Tensor | None:
        if not self.training:
            return None
        return expert_capacity(num_tokens, self.k, self.num_experts, self.capacity_factor)


def run_queues(experts: Experts, hidden_BD: Tensor, routing: Routing) -> Tensor:
    """Copies of the tokens in one queue an expert; an assignment without a place gives zeros."""
    num_experts, k, width = routing.logits_BE.shape[-1], routing.experts_BK.shape[-1], hidden_BD.shape[-1]
    asked = torch.where(routing.kept_BK, routing.experts_BK, num_experts).flatten()
    load = torch.bincount(asked, minlength=num_experts + 1)[:-1].tolist()
    lengths = queue_lengths(load, hidden_BD.dtype, hidden_BD.device.type)
    num_rows = sum(lengths)
    rows_BK = _first_rows(lengths, routing.experts_BK) + routing.places_BK
    slots = torch.where(routing.kept_BK, rows_BK, num_rows).flatten()
    copies = hidden_BD.unsqueeze(1).expand(-1, k, -1).reshape(-1, width)
    # One row more than is computed: what is dropped lands there, and its output stays zero.
    rows_RD = hidden_BD.new_zeros(num_rows + 1, width).index_copy(0, slots, copies)[:-1]
    outputs = F.pad(experts.queues(rows_RD, lengths), (0, 0, 0, 1)).index_select(0, slots).view(-1, k, width)
    return (outputs * routing.weights_BK.to(outputs.dtype).unsqueeze(-1)).sum(1)


def _first_rows(lengths: list[int], experts_BK: Tensor) -> Tensor:
    """Where each chosen expert's queue begins."""
    if len(set(lengths)) == 1:
        return experts_BK * lengths[0]
    return torch.tensor([0, *accumulate(lengths[:-1])], device=experts_BK.device)[experts_BK]


def queue_lengths(load: list[int], dtype: torch.dtype, device: str = "cpu") -> list[int]:
    """How many rows each expert computes: as many as the fullest one has, so that one batched product does all.

    Where the load is so uneven that on a CPU this wastes more than it saves, each expert computes its own `load[e]`: a
    router that has collapsed on one expert then costs no more than one that balances, in time and in memory.
    Elsewhere, where a kernel's launch weighs more than its work, it is always one batched product.
    """
    if device != "cpu":
        return [max(load)] * len(load)
    num_places, worth = max(load), EMPTY_PLACES_WORTH_PADDING
    if dtype.itemsize == 2:
        num_places = math.ceil(num_places / PLACES_STEP_16_BIT) * PLACES_STEP_16_BIT
        worth = EMPTY_PLACES_WORTH_PADDING_16_BIT
    return load if num_places - sum(load) / len(load) > worth else [num_places] * len(load)


def run_dense(experts: Experts, hidden_BD: Tensor, routing: Routing) -> Tensor:
    """Every expert computes every token; those not chosen, or full, get weight 0."""
    outputs_EBD: Tensor = experts(hidden_BD.unsqueeze(0).expand(routing.logits_BE.shape[-1], -1, -1))
    weights_BK = (routing.weights_BK * routing.kept_BK).to(hidden_BD.dtype)
    gates_BE = torch.zeros_like(routing.probabilities_BE, dtype=hidden_BD.dtype).scatter(
        -1, routing.experts_BK, weights_BK
    )
    return (outputs_EBD * gates_BE.t().unsqueeze(-1)).sum(0)
