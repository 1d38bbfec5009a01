"""What rounding does to logits and to routing decisions. Uses the routers that are trained; trains none.

Axes: B tokens, D width, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orchestrator.workload import Context
from workloads.engine.precision import POLICIES, at_least_float32
from workloads.engine.random import generator, normal
from workloads.layers.router import route, router_logits, tie_share
from workloads.rounding.config import Config
from workloads.rounding.formats import spacing


def measure_logits(config: Config, dtype: torch.dtype) -> dict[str, float]:
    """The given logits, magnified in float64, then rounded once."""
    exact = torch.tensor(config.logits, dtype=torch.float64)
    exact = exact * config.magnitude if config.mode == "scale" else exact + config.magnitude
    rounded = exact.to(dtype)
    first = gate(at_least_float32(rounded))
    return {
        **{f"rounded/{place}": value for place, value in enumerate(rounded.tolist())},
        **{f"spacing/{place}": value for place, value in enumerate(spacing(rounded).tolist())},
        "max_abs_error": (rounded.double() - exact).abs().max().item(),
        "gate": first,
        "gate_in_dtype": gate(rounded),
        "gate_error": abs(first - gate(exact)),
        "tie": float(rounded[0] == rounded[1]),
    }


def gate(logits: Tensor) -> float:
    """The probability of the first of two experts, the softmax taken in the dtype of the logits."""
    return route(logits[:2].unsqueeze(0), 1, False, logits.dtype).probabilities_BE[0, 0].item()


def measure_routing(config: Config, context: Context) -> dict[str, float]:
    """Top-1 routing under the precision policy, token by token against float64."""
    tokens_BD, weight_ED, offset = draw_router(config, context)
    exact_BE = tokens_BD.double() @ weight_ED.double().t() + offset
    policy = POLICIES[config.precision]
    routing = route(router_logits(tokens_BD, weight_ED, offset, policy), 1, False, policy.router_softmax)
    gates_B = exact_BE.softmax(-1).amax(-1)
    error_B = (routing.weights_BK[:, 0].double() - gates_B).abs()
    return {
        "router/flip_share": (routing.experts_BK[:, 0] != exact_BE.argmax(-1)).double().mean().item(),
        "router/tie_share": tie_share(routing.logits_BE, 1).item(),
        "router/gate_error/mean": error_B.mean().item(),
        "router/gate_error/max": error_B.max().item(),
        "router/abs_max_logit": exact_BE.abs().max().item(),
    }


def draw_router(config: Config, context: Context) -> tuple[Tensor, Tensor, float]:
    """Tokens [B, D], weights [E, D] and an offset. What is exact in bfloat16 leaves only the logits to be rounded."""
    tokens_BD = normal((config.num_tokens, config.d_model), generator(context, "data"))
    weight_ED = normal((config.num_experts, config.d_model), generator(context, "init")) / config.d_model**0.5
    scale, offset = (config.magnitude, 0.0) if config.mode == "scale" else (1.0, config.magnitude)
    return tokens_BD.bfloat16().float(), weight_ED.bfloat16().float() * scale, offset
