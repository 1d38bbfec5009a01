"""Takes one measurement and reports it. What is measured lies in the files beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from orchestrator.trial import Report
from orchestrator.workload import Context
from workloads.rounding.config import METRICS, Config
from workloads.rounding.formats import limits
from workloads.rounding.gradients import measure_gradients
from workloads.rounding.routing import measure_logits, measure_routing

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class Rounding:
    """Trials of one seed measure the same tokens, weights and batches."""

    Config = Config
    metrics = METRICS

    def run(self, config: Any, context: Context) -> Iterator[Report]:
        """Reports once on a `Config`, unless it was told to stop before."""
        metrics = measure(config, context)
        if not context.stopping:
            yield Report(1, metrics)


def measure(config: Config, context: Context) -> dict[str, float]:
    dtype = DTYPES[config.dtype]
    if config.measure == "logits":
        return measure_logits(config, dtype)
    if config.measure == "routing":
        return measure_routing(config, context)
    if config.measure == "limits":
        return limits(dtype)
    return measure_gradients(config, context, dtype)
