"""A linear map with float32 master weights that computes in the dtype it is told. Draws only where told."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.engine.random import uniform_parameter


class Linear(nn.Module):
    """As torch.nn.Linear, without its use of the global generator."""

    def __init__(self, width_in: int, width_out: int, source: torch.Generator) -> None:
        super().__init__()
        self.weight = uniform_parameter((width_out, width_in), width_in, source)
        self.bias = uniform_parameter((width_out,), width_in, source)

    def forward(self, inputs: Tensor, compute: torch.dtype) -> Tensor:
        return F.linear(inputs.to(compute), self.weight.to(compute), self.bias.to(compute))
