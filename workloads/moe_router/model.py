"""The network Linear -> MoE -> Linear and its loss. Holds no data and no optimiser.

Axes: B rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.engine.precision import POLICIES, Precision, at_least_float32
from workloads.engine.update import Blocks, Hyper, Scalar, weighted
from workloads.layers.linear import Linear
from workloads.layers.moe import Dispatch, MoE
from workloads.layers.router import Routing, load_balance_loss, router_z_loss
from workloads.moe_router.config import Config
from workloads.moe_router.task import NUM_INPUTS, NUM_OUTPUTS, Batch


class MoeRegression(nn.Module):
    """No residual and no activation outside the experts: what is not routed well is not learned."""

    def __init__(
        self,
        config: Config,
        source: torch.Generator,
        precision: Precision | None = None,
        dispatch: Dispatch = "queues",
    ) -> None:
        super().__init__()
        self.precision = precision or POLICIES[config.precision]
        self.embed = Linear(NUM_INPUTS, config.d_model, source)
        self.moe = MoE(
            config.d_model,
            config.d_hidden,
            config.num_experts,
            config.k,
            config.renormalize is True,
            self.precision,
            source,
            config.capacity_factor,
            config.offset_learnable,
            dispatch,
        )
        self.readout = Linear(config.d_model, NUM_OUTPUTS, source)

    def forward(self, inputs_BI: Tensor, offset: Scalar = 0.0) -> tuple[Tensor, Routing]:
        """Predictions [B, O] in float32 (float64 under a float64 policy), and how the rows were routed."""
        mixed_BD, routing = self.moe(self.embed(inputs_BI, self.precision.compute), offset)
        return at_least_float32(self.readout(mixed_BD, self.precision.compute)), routing

    def blocks(self) -> Blocks:
        """Every parameter once, under the name its gradient norm is reported by."""
        parts = {
            "embed": self.embed,
            "router": self.moe.router,
            "experts": self.moe.experts,
            "readout": self.readout,
        }
        return {name: list(part.parameters()) for name, part in parts.items()}


class Seen(NamedTuple):
    """What a batch showed beside its loss."""

    mse: Tensor
    routing: Routing


def moe_loss(call: Callable[..., Any], batch: Batch, hyper: Hyper) -> tuple[Tensor, Seen]:
    """Mean squared error + alpha * balance + c_z * router z-loss, a scalar.

    `call(inputs, offset)` is the model, or its functional form; `hyper` holds `alpha`, `c_z` and the logits' `offset`
    as numbers or tensors without axes, and `load_E` where the batch is part of a window whose load counts. Nothing here
    depends on a value, so the whole may run under vmap.
    """
    prediction_BO, routing = call(batch.inputs_NI, hyper["offset"])
    load_E = cast("Tensor | None", hyper.get("load_E"))
    mse = F.mse_loss(prediction_BO, batch.targets_NO)
    balance = weighted(
        hyper["alpha"], lambda: load_balance_loss(routing.probabilities_BE, routing.experts_BK, load_E=load_E)
    )
    z = weighted(hyper["c_z"], lambda: router_z_loss(routing.logits_BE))
    return mse + balance + z, Seen(mse, routing)
