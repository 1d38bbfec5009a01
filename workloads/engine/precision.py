"""Says which part of a model computes in which dtype. Casts are explicit: autocast is never used, weights stay float32.

Master weights and optimiser state are float32 under every policy, so gradients are float32 when they are unscaled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Precision:
    """Where a model rounds.

    `router_logits` is the dtype of the router's input, weight, logits and offset; `router_softmax` that of its
    probabilities. `scales_loss` asks for a GradScaler, which float16 needs: its smallest positive number is 2^-24.
    """

    compute: torch.dtype
    router_logits: torch.dtype
    router_softmax: torch.dtype
    scales_loss: bool = False


POLICIES = {
    "fp32": Precision(torch.float32, torch.float32, torch.float32),
    # Everything rounds, the router's softmax included.
    "bf16": Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
    # As Granite's source does it: the logits are already rounded when the softmax is protected.
    "bf16-softmax": Precision(torch.bfloat16, torch.bfloat16, torch.float32),
    # As Switch Transformers (Fedus et al., 2021) does it: the router's input is cast first.
    "bf16-selective": Precision(torch.bfloat16, torch.float32, torch.float32),
    "fp16": Precision(torch.float16, torch.float32, torch.float32, scales_loss=True),
}


def at_least_float32(values: Tensor) -> Tensor:
    """`values` in float32, or in float64 if they are already. Losses and statistics are computed in this."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def loss_scaler(precision: Precision, device: str, initial_scale: float = 65536.0) -> torch.amp.GradScaler:
    """A GradScaler, which does nothing at all under the policies that need none."""
    return torch.amp.GradScaler(device, init_scale=initial_scale, enabled=precision.scales_loss)
