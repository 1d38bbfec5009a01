"""Random numbers with an owner: explicit generators, always drawn on the CPU.

Drawing on the CPU gives a trial the same weights and batches on every device. The global generators of Python, NumPy
and torch belong to the trial while it trains, for models that use them, and are given back as they were.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from orchestrator.workload import Context

Step = TypeVar("Step")


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


def noise_seed(stream_seed: int, step: int, micro: int) -> int:
    """A seed for the dropout masks of one micro-batch: the same whenever and however often it is computed."""
    mixed = (stream_seed ^ (step * 0x9E3779B97F4A7C15) ^ (micro * 0xC2B2AE3D27D4EB4F)) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)  # splitmix64 (Steele et al., 2014)
    return ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & (2**64 - 1)) >> 1


def with_own_globals(steps: Generator[Step], seed: int) -> Generator[Step]:
    """The same items, made on global generators that start from `seed` and belong to `steps` alone.

    Between two items the caller has its own back: other trials may draw in the meantime.
    """
    own = None
    try:
        while True:
            callers = global_states()
            set_global_states(own) if own else seed_globals(seed)
            try:
                item = next(steps)
            except StopIteration:
                return
            finally:
                own = global_states()
                set_global_states(callers)
            yield item
    finally:
        steps.close()


def seed_globals(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def global_states() -> dict[str, Any]:
    """The states of the global generators, in types that torch.load reads without running code."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_global_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])
