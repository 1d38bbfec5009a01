"""A stack of tanh layers without biases, plain or residual. Keeps every state on the way; knows no loss.

Axes: N rows, W width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from workloads.engine.random import normal


class TanhStack(nn.Module):
    """h_(i+1) = tanh(h_i W_i), to which a residual stack adds h_i. W_i ~ N(0, scale^2 / width).

    At scale 1 a linear layer would keep the size of its input; tanh only ever shrinks it.
    """

    def __init__(self, width: int, depth: int, scale: float, residual: bool, source: torch.Generator) -> None:
        super().__init__()
        self.residual = residual
        std = scale / math.sqrt(width)
        self.weights = nn.ParameterList(nn.Parameter(std * normal((width, width), source)) for _ in range(depth))

    def forward(self, inputs_NW: Tensor) -> list[Tensor]:
        """All states h_0 (the input) to h_depth (the output), each [N, W], in the dtype of the input."""
        states_NW = [inputs_NW]
        for weight_WW in self.weights:
            before_NW = states_NW[-1]
            change_NW = torch.tanh(before_NW @ weight_WW.to(before_NW.dtype))
            states_NW.append(before_NW + change_NW if self.residual else change_NW)
        return states_NW
