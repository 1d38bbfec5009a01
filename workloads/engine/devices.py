"""Which device a trial trains on. Chooses none that the trial was not given."""

from __future__ import annotations

from orchestrator.workload import Context


def choose_device(wanted: str, context: Context) -> str:
    """`auto` is the device the trial was given. Raises ValueError for a GPU that the trial was not given."""
    if wanted == "cuda" and context.device != "cuda":
        raise ValueError("device: cuda, but this trial was given no GPU; set resources.gpu above 0, or device: auto")
    return context.device if wanted == "auto" else wanted
