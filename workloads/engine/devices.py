"""Which device a trial trains on, and how much of it. Chooses none that the trial was not given."""

from __future__ import annotations

import torch

from orchestrator.workload import Context


def choose_device(wanted: str, context: Context) -> str:
    """`auto` is the device the trial was given. Raises ValueError for a GPU that the trial was not given.

    Of a GPU that others share, torch gets the trial's part of the memory and no more: call it before anything is put
    there. What CUDA itself needs for each process, some hundred MB, comes on top.
    """
    if wanted == "cuda" and context.device != "cuda":
        raise ValueError("device: cuda, but this trial was given no GPU; set resources.gpu above 0, or device: auto")
    device = context.device if wanted == "auto" else wanted
    if device == "cuda" and 0 < context.gpu_share < 1:
        torch.cuda.set_per_process_memory_fraction(context.gpu_share)
    return device
