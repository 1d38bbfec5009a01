"""A training run's whole state as bytes, and back. Writes no file.

Names are those of the model itself, never of its compiled wrapper, so a checkpoint loads with and without `compile`.
"""

from __future__ import annotations

import io
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from workloads.engine.random import global_states, set_global_states
from workloads.engine.tally import Tally
from workloads.engine.update import Trainer
from workloads.engine.windows import Windows

FORMAT = 1


def to_bytes(step: int, model: nn.Module, trainer: Trainer, windows: Windows, tally: Tally, healthy: bool) -> bytes:
    """Everything the updates after `step` depend on."""
    state = {
        "format": FORMAT,
        "step": step,
        "model": model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "schedules": [schedule.state_dict() for schedule in trainer.schedules],
        "scaler": trainer.scaler.state_dict(),
        "windows": windows.state_dict(),
        "tally": asdict(tally),
        "healthy": healthy,
        "globals": global_states(),
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def from_bytes(content: bytes, model: nn.Module, trainer: Trainer, windows: Windows) -> tuple[int, Tally, bool]:
    """Loads all of it strictly; returns the step, the tally and whether training was healthy so far.

    Raises ValueError for another format, RuntimeError for weights that do not fit the model.
    """
    state: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if state["format"] != FORMAT:
        raise ValueError(f"a checkpoint of format {state['format']}; this version reads format {FORMAT}")
    model.load_state_dict(state["model"], strict=True)
    trainer.optimizer.load_state_dict(state["optimizer"])
    for schedule, saved in zip(trainer.schedules, state["schedules"], strict=True):
        schedule.load_state_dict(saved)
    trainer.scaler.load_state_dict(state["scaler"])
    windows.load_state_dict(state["windows"])
    set_global_states(state["globals"])
    return state["step"], Tally(**state["tally"]), state["healthy"]
