"""Chooses experts for tokens and says how well that went: logits, routing, auxiliary losses, load. Runs no expert.

Axes: B tokens of a batch, D model width, E experts, K chosen experts of a token (best first).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.engine.precision import Precision, at_least_float32
from workloads.engine.random import uniform_parameter
from workloads.engine.update import Scalar

ROUNDING = 1e-9  # 1.1 * 400 / 8 is 55.00000000000001 in float64, and no reason for a 56th place


class Routing(NamedTuple):
    """Where each token goes.

    `logits_BE` are the raw logits, offset included, in the dtype they were rounded to. `places_BK` is a token's place
    in its expert's queue, from 0, in token order; `kept_BK` is False where the expert was full, and for padding.
    `valid_B` is False for padding, which stands in no queue; what else is said of such a token means nothing.
    """

    logits_BE: Tensor
    probabilities_BE: Tensor
    weights_BK: Tensor
    experts_BK: Tensor
    places_BK: Tensor
    kept_BK: Tensor
    valid_B: Tensor


class Router(nn.Module):
    """The linear map to one logit an expert, without bias, plus an offset common to all experts.

    The offset is an imposed stress: no softmax sees it, but rounding does, and so does the router z-loss. With
    `learnable_offset` a correction, at first 0, is learned on top of the imposed one.
    """

    def __init__(self, width: int, num_experts: int, learnable_offset: bool, source: torch.Generator) -> None:
        super().__init__()
        self.weight = uniform_parameter((num_experts, width), width, source)
        self.offset = nn.Parameter(torch.zeros(())) if learnable_offset else None

    def forward(self, hidden_BD: Tensor, offset: Scalar, precision: Precision) -> Tensor:
        common = offset if self.offset is None else self.offset + offset
        return router_logits(hidden_BD, self.weight, common, precision)


def router_logits(hidden_BD: Tensor, weight_ED: Tensor, offset: Scalar, precision: Precision) -> Tensor:
    """Logits [B, E] in `precision.router_logits`. Input, weight and offset are cast to it before anything is added.

    Autocast changes neither these logits nor their gradient.
    """
    dtype = precision.router_logits
    # Explicit casts are not enough: autocast would cast the inputs of F.linear once more.
    linear = _LinearBesideAutocast.apply if torch.is_autocast_enabled(hidden_BD.device.type) else F.linear
    logits_BE: Tensor = linear(hidden_BD.to(dtype), weight_ED.to(dtype))
    return logits_BE + torch.as_tensor(offset, dtype=dtype, device=logits_BE.device)


class _LinearBesideAutocast(torch.autograd.Function):
    """F.linear as it is without autocast, also where `backward` is called within autocast."""

    generate_vmap_rule = True

    @staticmethod
    def forward(inputs: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, enabled=False):
            return F.linear(inputs, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        inputs, weight = ctx.saved_tensors
        with torch.autocast(gradient.device.type, enabled=False):
            return gradient @ weight, gradient.t() @ inputs


def route(
    logits_BE: Tensor,
    k: int,
    renormalize: bool,
    softmax: torch.dtype,
    capacity: int | Tensor | None = None,
    valid_B: Tensor | None = None,
) -> Routing:
    """The `k` largest logits of each token, and what their experts' outputs are multiplied by.

    With `renormalize` the weights are the softmax over the chosen logits and sum to 1; for k = 1 that is the constant
    1, whose gradient is exactly 0. (The form p / p.sum() leaves rounding noise there, which Adam amplifies.) Without,
    they are the probabilities themselves (Switch Transformers: y = p E(x)). An expert takes `capacity` assignments at
    most, first come first served; padding, where `valid_B` is False, asks for nothing.
    """
    logits = logits_BE.to(softmax)
    probabilities_BE = logits.softmax(-1)
    top_logits_BK, experts_BK = logits.topk(k, dim=-1)
    weights_BK = top_logits_BK.softmax(-1) if renormalize else probabilities_BE.gather(-1, experts_BK)
    if valid_B is None:
        valid_B = torch.ones(len(logits_BE), dtype=torch.bool, device=logits_BE.device)
    places_BK = queue_places(experts_BK, logits_BE.shape[-1], valid_B)
    kept_BK = (places_BK < (math.inf if capacity is None else capacity)) & valid_B.bool().unsqueeze(-1)
    return Routing(logits_BE, probabilities_BE, weights_BK, experts_BK, places_BK, kept_BK, valid_B.bool())


def queue_places(experts_BK: Tensor, num_experts: int, valid_B: Tensor | None = None) -> Tensor:
    """Each assignment's place in its expert's queue: token by token, a token's better choice first."""
    before = _asked(experts_BK, num_experts, valid_B).flatten(0, 1).cumsum(0)
    return (before.gather(-1, experts_BK.reshape(-1, 1)) - 1).reshape(experts_BK.shape)


def expert_capacity(
    num_tokens: int | Tensor, k: int, num_experts: int, capacity_factor: float | None
) -> int | Tensor | None:
    """How many assignments an expert takes: capacity_factor times its even share, rounded up. None means no limit.

    The number of valid tokens may be a tensor, which is then not read: under vmap it may differ between members.
    """
    if capacity_factor is None:
        return None
    if isinstance(num_tokens, Tensor):
        return (capacity_factor * num_tokens.double() * k / num_experts - ROUNDING).ceil()
    return math.ceil(capacity_factor * num_tokens * k / num_experts - ROUNDING)


def one_hot(indices: Tensor, num_classes: int) -> Tensor:
    """1 at each index on a new last axis, int64. Unlike torch's own it also works inside vmap(grad)."""
    return (indices.unsqueeze(-1) == torch.arange(num_classes, device=indices.device)).long()


def router_z_loss(logits_BE: Tensor, valid_B: Tensor | None = None) -> Tensor:
    """Mean squared log-sum-exp of the raw logits, a scalar in float32 (float64 for float64 logits).

    Masked tokens do not count. Shifting all logits by a constant changes this loss but no routing decision.
    Source: ST-MoE (Zoph et al., 2022), eq. 5; gradient 2/B * LSE * softmax.
    """
    return masked_mean(at_least_float32(logits_BE).logsumexp(-1).square(), valid_B)


def load_balance_loss(
    probabilities_BE: Tensor, experts_BK: Tensor, valid_B: Tensor | None = None, load_E: Tensor | None = None
) -> Tensor:
    """E * sum_i f_i P_i, a scalar: 1 when balanced, E when all goes to one expert with certainty.

    f_i is the share of assignments that ask for expert i and sums to 1 for every k (a convention that sums to k doubles
    the coefficient at k = 2); no gradient flows through it. P_i is the mean probability of expert i.
    Not linear in the batch: the mean over micro-batches, each with its own f, is not the loss of the joined batch. With
    the load of the whole window as `load_E` [E] it is, each micro-batch weighted by its share of the valid tokens.
    Source: Switch Transformers (Fedus et al., 2021), eq. 4.
    """
    if load_E is None:
        load_E = expert_load(experts_BK, probabilities_BE.shape[-1], valid_B)
    load_E = load_E.to(at_least_float32(probabilities_BE).dtype)
    return balance(probabilities_BE, load_E / load_E.sum().clamp(min=1), valid_B)


def balance(probabilities_BE: Tensor, share_E: Tensor, valid_B: Tensor | None = None) -> Tensor:
    """E * sum_i f_i P_i with the shares f_i as given; see `load_balance_loss`."""
    mean_E = masked_mean(at_least_float32(probabilities_BE), valid_B)
    return len(share_E) * (share_E.to(mean_E) * mean_E).sum()


def expert_load(experts_BK: Tensor, num_experts: int, valid_B: Tensor | None = None) -> Tensor:
    """How many assignments of valid tokens ask for each expert, int64 [E]; full experts still count what was asked."""
    return _asked(experts_BK, num_experts, valid_B).sum((0, 1))


def _asked(experts_BK: Tensor, num_experts: int, valid_B: Tensor | None) -> Tensor:
    """1 where an assignment of a valid token asks for an expert, int64 [B, K, E]."""
    asked_BKE = one_hot(experts_BK, num_experts)
    return asked_BKE if valid_B is None else asked_BKE * valid_B.long().reshape(-1, 1, 1)


def masked_mean(values: Tensor, valid_B: Tensor | None) -> Tensor:
    """The mean over the first axis, of valid tokens only; what a masked token holds, NaN included, does not matter.

    Without any valid token it is 0: such a micro-batch counts nothing, and 0 * NaN would be NaN.
    """
    if valid_B is None:
        return values.mean(0)
    valid = valid_B.bool().reshape(-1, *[1] * (values.dim() - 1))
    return torch.where(valid, values, 0).sum(0) / valid.sum().clamp(min=1)


def tie_share(logits_BE: Tensor, k: int, valid_B: Tensor | None = None) -> Tensor:
    """The share of tokens whose k-th and (k+1)-th logit are exactly equal, so that chance chooses the expert."""
    if k == logits_BE.shape[-1]:
        return torch.zeros((), device=logits_BE.device)
    top = logits_BE.topk(k + 1, dim=-1).values
    return masked_mean((top[:, k - 1] == top[:, k]).float(), valid_B)
