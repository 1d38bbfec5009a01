"""What a number format can hold, found by trying its bit patterns. Asks no table such as torch.finfo.

Positive floating-point numbers are in the order of their bit patterns, so the next number is the next pattern.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


def pattern(values: Tensor) -> Tensor:
    return values.view(BITS[values.dtype])


def spacing(values: Tensor) -> Tensor:
    """The distance to the next number away from 0, float64; 2^(q-7) for a bfloat16 in [2^q, 2^(q+1))."""
    sizes = values.abs()
    return (pattern(sizes) + 1).view(values.dtype).double() - sizes.double()


def limits(dtype: torch.dtype) -> dict[str, float]:
    """The largest and smallest positive number, what float32 numbers are lost beyond them, and the spacing at 1."""
    infinity = torch.tensor(torch.inf, dtype=dtype)
    overflows_from = first_float32(lambda number: bool(number.to(dtype).isinf()))
    first_kept = first_float32(lambda number: bool(number.to(dtype) != 0))
    return {
        "largest": (pattern(infinity) - 1).view(dtype).item(),
        "smallest": spacing(torch.zeros((), dtype=dtype)).item(),
        "rounds_to_zero_at": (pattern(first_kept) - 1).view(torch.float32).item(),
        "overflows_from": overflows_from.item(),
        "epsilon": spacing(torch.ones((), dtype=dtype)).item(),
    }


def first_float32(holds: Callable[[Tensor], bool]) -> Tensor:
    """The smallest positive float32 for which `holds`, by bisection; infinity if it holds for no smaller one.

    Where `holds` is true it must stay true for everything larger.
    """
    low, high = 0, int(pattern(torch.tensor(torch.inf)))
    while high - low > 1:
        middle = (low + high) // 2
        if holds(torch.tensor(middle, dtype=torch.int32).view(torch.float32)):
            high = middle
        else:
            low = middle
    return torch.tensor(high, dtype=torch.int32).view(torch.float32)
