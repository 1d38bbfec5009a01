"""Dropout without state: a mask is a function of its seed. Touches no generator that anything else uses.

Recomputing a block, reading the same micro-batch twice, or resuming a run therefore meets the same mask.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

Seed = tuple[int | str, ...]


def dropout(values: Tensor, p: float, seed: Seed) -> Tensor:
    """Zeroes each value with probability `p` and divides the others by 1 - p; `values` itself for p = 0.

    Equal seeds give equal masks, on every device and in every process. A NaN stays one where it is dropped.
    """
    if p == 0.0:
        return values
    kept: Tensor = draw_kept(values.shape, p, seed)
    return values * kept.to(values.device) * (1.0 / (1.0 - p))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it cannot trace a generator, and would compile every seed
def draw_kept(shape: torch.Size, p: float, seed: Seed) -> Tensor:
    """What is kept, bool, on the CPU. The seed is hashed: of a number, torch's generator reads the lowest 32 bits."""
    digest = hashlib.sha256(repr(seed).encode()).digest()
    source = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
    return torch.empty(shape, dtype=torch.bool).bernoulli_(1.0 - p, generator=source)
