"""Random numbers with an owner: explicit generators, never torch's global one, always drawn on the CPU.

Drawing on the CPU gives a trial the same weights and batches on every device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from orchestrator.workload import Context


def generator(context: Context, stream: str) -> torch.Generator:
    """The generator of one stream of this trial; it depends on the trial's `seed` and the stream's name only."""
    return torch.Generator().manual_seed(context.seed(stream))


def uniform_parameter(shape: tuple[int, ...], fan_in: int, source: torch.Generator) -> nn.Parameter:
    """A float32 parameter, uniform within 1/sqrt(fan_in): the distribution torch.nn.Linear starts from."""
    bound = 1.0 / math.sqrt(fan_in)
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=source))


def normal(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    """Standard normal draws, float32, on the CPU."""
    return torch.randn(shape, generator=source)
