"""Causal self-attention through torch's scaled_dot_product_attention. Knows no padding and no cache.

Rows are padded at their end: a causal mask already keeps what is valid from seeing it.

Axes: B rows, T time, D model width, H heads, W width of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.layers.linear import Linear


class CausalAttention(nn.Module):
    """Queries, keys and values of all heads in one linear map, as nanoGPT has it, and an output projection.

    No dropout on the attention's probabilities: torch would draw it from its global generator. Raises ValueError
    unless `heads` divides `width`.
    """

    def __init__(self, width: int, heads: int, std: float, std_out: float, source: torch.Generator) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"heads={heads} does not divide width={width}")
        self.heads = heads
        self.qkv = Linear(width, 3 * width, source, std)
        self.out = Linear(width, width, source, std_out)

    def forward(self, hidden_BTD: Tensor, compute: torch.dtype) -> Tensor:
        query_BHTW, key_BHTW, value_BHTW = (
            part_BTD.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part_BTD in self.qkv(hidden_BTD, compute).chunk(3, dim=-1)
        )
        mixed_BHTW = F.scaled_dot_product_attention(query_BHTW, key_BHTW, value_BHTW, is_causal=True)
        out_BTD: Tensor = self.out(mixed_BHTW.transpose(1, 2).flatten(-2), compute)
        return out_BTD
