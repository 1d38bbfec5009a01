"""What a dense GPT keeps for its backward pass, from its shape: written down, not run. Knows no attention but SDPA's.

Axes: B rows, T time, D model width, H heads, V vocabulary.
"""

from __future__ import annotations

import torch

from workloads.engine.precision import Precision
from workloads.layers.transformer import GPTShape

FLOAT32, INT64, BOOL = 4, 8, 1  # bytes


def predict_saved_bytes(
    shape: GPTShape, precision: Precision, num_rows: int, num_positions: int, padded: bool
) -> dict[str, int]:
    """Bytes by section (embed, block0 .., readout, loss) of a micro-batch [B, T] and its mean cross-entropy.

    Per token, a block keeps 16 D values of the compute dtype: stream, norm, query, key and value, and the attention's
    output; then stream, norm, and four times the width before and behind the GELU. To them come mean and inverse
    deviation of both norms, and a float32 log-sum-exp a head. Where the compute dtype is not the weights', each matrix,
    norm and the readout is kept once more as it was cast. Dropout keeps a mask of bool where it falls; a checkpointed
    block keeps its input only. Exact for the CPU's kernels; those of a GPU may pad, or keep moments in float32.
    """
    num_tokens, width = num_rows * num_positions, shape.width
    size = precision.compute.itemsize
    is_cast = precision.compute != torch.float32
    mask = BOOL * num_tokens * width if shape.dropout else 0
    weights = size * (12 * width**2 + 2 * 2 * width) if is_cast else 0
    block = size * num_tokens * (16 * width + 2 * 2) + FLOAT32 * num_tokens * shape.heads + 2 * mask + weights
    readout = size * (width * shape.vocabulary + 2 * width) if is_cast else 0
    return {
        "embed": INT64 * num_tokens + mask,  # the tokens themselves
        **dict.fromkeys(_names(shape.depth), size * num_tokens * width if shape.checkpointing else block),
        "readout": size * num_tokens * (2 * width + 2) + readout,
        "loss": _loss_bytes(num_tokens, shape.vocabulary, padded),
    }


def _names(depth: int) -> list[str]:
    return [f"block{layer}" for layer in range(depth)]


def _loss_bytes(num_tokens: int, vocabulary: int, padded: bool) -> int:
    """Log-probabilities, targets and their summed weight; with padding also the mask and the count of valid targets."""
    return FLOAT32 * (num_tokens * vocabulary + 1) + INT64 * num_tokens + (BOOL * num_tokens + INT64 if padded else 0)
