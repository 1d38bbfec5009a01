"""Linear maps and layer norms with float32 master weights: they compute in the dtype they are told, draw where told."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.engine.random import uniform_parameter


class Linear(nn.Module):
    """As torch.nn.Linear, without its use of the global generator.

    With `std` the weights start from N(0, std^2) and the bias from 0, as GPT-2's do.
    """

    def __init__(self, width_in: int, width_out: int, source: torch.Generator, std: float | None = None) -> None:
        super().__init__()
        if std is None:
            self.weight = uniform_parameter((width_out, width_in), width_in, source)
            self.bias = uniform_parameter((width_out,), width_in, source)
        else:
            self.weight = normal_parameter((width_out, width_in), std, source)
            self.bias = nn.Parameter(torch.zeros(width_out))

    def forward(self, inputs: Tensor, compute: torch.dtype) -> Tensor:
        return F.linear(inputs.to(compute), self.weight.to(compute), self.bias.to(compute))


class LayerNorm(nn.Module):
    """As torch.nn.LayerNorm: weight 1 and bias 0 at first. torch takes the moments in float32 or better."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, inputs: Tensor, compute: torch.dtype) -> Tensor:
        shape = self.weight.shape
        return F.layer_norm(inputs.to(compute), shape, self.weight.to(compute), self.bias.to(compute))


def normal_parameter(shape: tuple[int, ...], std: float, source: torch.Generator) -> nn.Parameter:
    """A float32 parameter from N(0, std^2). On the meta device there is nothing to fill and nothing is drawn."""
    values = torch.empty(shape)
    return nn.Parameter(values if values.is_meta else values.normal_(0.0, std, generator=source))
