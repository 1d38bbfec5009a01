"""The small network, its examples and its loss. Trains nothing.

Axes: N examples, I inputs, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.workload import Context
from workloads.accumulation.config import NUM_CLASSES, Config
from workloads.engine.precision import Precision, at_least_float32
from workloads.engine.random import generator
from workloads.engine.update import Hyper
from workloads.layers.linear import Linear

NUM_INPUTS = 12
NUM_HIDDEN = 32


class Examples(NamedTuple):
    """A micro-batch. `weights_N` is 0 where a target is masked; `num_valid` is what it counts in its window."""

    inputs_NI: Tensor
    targets_N: Tensor
    weights_N: Tensor
    num_valid: float


class Network(nn.Module):
    """Linear, a norm if asked for, tanh, Linear. The norm computes in float32 or better."""

    def __init__(self, norm_layer: str, precision: Precision, source: torch.Generator) -> None:
        super().__init__()
        self.compute = precision.compute
        self.hidden = Linear(NUM_INPUTS, NUM_HIDDEN, source)
        self.norm = nn.Identity() if norm_layer == "none" else nn.BatchNorm1d(NUM_HIDDEN)
        self.norm.train(norm_layer == "batchnorm")
        self.readout = Linear(NUM_HIDDEN, NUM_CLASSES, source)

    def forward(self, inputs_NI: Tensor) -> Tensor:
        hidden_NH = self.norm(at_least_float32(self.hidden(inputs_NI, self.compute))).tanh()
        return at_least_float32(self.readout(hidden_NH, self.compute))


def cross_entropy(call: Callable[..., Any], examples: Examples, hyper: Hyper) -> tuple[Tensor, None]:
    """The weighted mean over the examples, a scalar; 0 where all are masked, whose mean would be 0/0."""
    nats_N = F.cross_entropy(call(examples.inputs_NI), examples.targets_N, reduction="none")
    weights_N = examples.weights_N.to(nats_N)
    return (nats_N * weights_N).sum() / weights_N.sum().clamp(min=torch.finfo(nats_N.dtype).tiny), None


def draw_windows(config: Config, context: Context) -> list[list[Examples]]:
    """The examples of the trial, cut into windows of micro-batches."""
    source = generator(context, "data")
    class_weights_C = torch.tensor(config.class_weights or [1.0] * NUM_CLASSES, dtype=torch.float64)
    windows = []
    for number, sizes in enumerate(config.windows, 1):
        num_examples = sum(sizes)
        inputs_NI = torch.randn(num_examples, NUM_INPUTS, generator=source)
        targets_N = torch.randint(NUM_CLASSES, (num_examples,), generator=source)
        valid_N = torch.rand(num_examples, generator=source) >= config.mask_rate
        valid_N[0] = True
        if number == config.overflow_at:
            inputs_NI[0, 0] = torch.inf
        parts = zip(*(torch.split(tensor, sizes) for tensor in (inputs_NI, targets_N, valid_N)), strict=True)
        windows.append([_micro_batch(config, class_weights_C, *part) for part in parts])
    return windows


def _micro_batch(
    config: Config, class_weights_C: Tensor, inputs_NI: Tensor, targets_N: Tensor, valid_N: Tensor
) -> Examples:
    weights_N = class_weights_C[targets_N] * valid_N
    counts = {"weight_sum": weights_N.sum().item(), "rows": len(valid_N)}
    return Examples(inputs_NI, targets_N, weights_N, counts.get(config.weighting, int(valid_N.sum())))


def join(window: Sequence[Examples]) -> Examples:
    """The window as one batch."""
    inputs, targets, weights, counts = zip(*window, strict=True)
    return Examples(torch.cat(inputs), torch.cat(targets), torch.cat(weights), sum(counts))
