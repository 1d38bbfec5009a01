"""A training run's whole state as bytes, and back. Writes no file.

Names are those of the model itself, never of its compiled wrapper, so a checkpoint loads with and without `compile`.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch

from workloads.engine.random import global_states, set_global_states

FORMAT = 2


def to_bytes(state: Mapping[str, Any]) -> bytes:
    """`state`, made of tensors and plain values, and the global generators as they are."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, "globals": global_states(), "state": dict(state)}, buffer)
    return buffer.getvalue()


def from_bytes(content: bytes) -> dict[str, Any]:
    """The state, on the CPU; sets the global generators. Raises ValueError for another format."""
    saved: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if saved["format"] != FORMAT:
        raise ValueError(f"a checkpoint of format {saved['format']}; this version reads format {FORMAT}")
    set_global_states(saved["globals"])
    state: dict[str, Any] = saved["state"]
    return state
