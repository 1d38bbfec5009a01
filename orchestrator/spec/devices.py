"""What `device` and `precision`, field names of many workloads, mean for a sweep's resources. Looks at no machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.spec.domains import ends
from orchestrator.spec.params import Params
from orchestrator.spec.problems import Problems
from orchestrator.spec.sweep_spec import Resources


def refuse_cuda_without_gpu(
    params: Params, resources: Resources, where: Callable[[str], str], problems: Problems
) -> None:
    """Such a trial would see no GPU, whatever the machine has."""
    if resources.gpu == 0 and "cuda" in _values(params, "device"):
        message = "cuda, but a trial is given no GPU (resources.gpu is 0); set resources.gpu above 0, or device: auto"
        problems.add(where("params.device"), "params.device", message)


def device_notes(params: Params, resources: Resources) -> tuple[str, ...]:
    """What is slow where the trials run."""
    if resources.gpu == 0 and "fp16" in _values(params, "precision"):
        return ("params.precision: fp16 on a CPU is 12-20 x slower than fp32; use it at toy size or on a GPU",)
    return ()


def _values(params: Params, name: str) -> tuple[Any, ...]:
    return ends(params.axes.get(name, params.fixed.get(name)))
