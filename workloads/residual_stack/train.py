"""The workload: measures a stack's gradients once, or trains it on a small regression through the engine's loop.

Axes: N rows, I inputs, O outputs, W width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.trial import Finding, Report
from orchestrator.workload import Context
from workloads.engine.precision import POLICIES, Precision, at_least_float32
from workloads.engine.random import generator, normal
from workloads.engine.training import TrainingWorkload
from workloads.engine.update import Blocks, Call, Hyper
from workloads.layers.linear import Linear
from workloads.residual_stack.config import METRICS, Config
from workloads.residual_stack.gradients import describe_lost_digits, measure, metrics_of
from workloads.residual_stack.stack import TanhStack

NUM_INPUTS = 8
NUM_TRAIN = 4096
NUM_TEST = 1024


class Rows(NamedTuple):
    """Inputs [N, I] and targets [N, 1], float32."""

    inputs_NI: Tensor
    targets_NO: Tensor

    @property
    def num_valid(self) -> int:
        return len(self.inputs_NI)


class Regression(NamedTuple):
    """The rows that are trained on, and those that are not."""

    training: Rows
    held_out: Rows

    @property
    def num_rows(self) -> int:
        return self.training.num_valid

    def batch(self, indices_B: Tensor, noise: int) -> Rows:
        indices_B = indices_B.to(self.training.inputs_NI.device)
        return Rows(self.training.inputs_NI[indices_B], self.training.targets_NO[indices_B])

    def split_rows(self) -> tuple[Tensor, Tensor]:
        return self.training.inputs_NI, self.held_out.inputs_NI

    def to(self, device: str) -> Regression:
        return Regression(*(Rows(*(tensor.to(device) for tensor in rows)) for rows in self))


def draw_regression(context: Context) -> Regression:
    """y = sin(2 a.x) over its standard deviation, for x ~ N(0, 1) and one direction `a` of length 1 for all trials."""
    direction_IO = F.normalize(normal((NUM_INPUTS, 1), torch.Generator().manual_seed(0)), dim=0)
    std = math.sqrt((1 - math.exp(-8)) / 2)  # of sin(2z), z ~ N(0, 1)
    inputs_NI = normal((NUM_TRAIN + NUM_TEST, NUM_INPUTS), generator(context, "data"))
    targets_NO = torch.sin(2 * inputs_NI @ direction_IO) / std
    return Regression(
        training=Rows(inputs_NI[:NUM_TRAIN], targets_NO[:NUM_TRAIN]),
        held_out=Rows(inputs_NI[NUM_TRAIN:], targets_NO[NUM_TRAIN:]),
    )


class StackRegression(nn.Module):
    """Linear, tanh stack, linear."""

    def __init__(self, config: Config, precision: Precision, source: torch.Generator) -> None:
        super().__init__()
        self.compute = precision.compute
        self.embed = Linear(NUM_INPUTS, config.width, source)
        self.stack = TanhStack(config.width, config.depth, config.scale, config.residual, source)
        self.readout = Linear(config.width, 1, source)

    def forward(self, inputs_NI: Tensor) -> Tensor:
        """Predictions [N, 1] in float32."""
        states_NW = self.stack(self.embed(inputs_NI, self.compute))
        return at_least_float32(self.readout(states_NW[-1], self.compute))

    def blocks(self) -> Blocks:
        layers = {f"layer{layer}": [weight] for layer, weight in enumerate(self.stack.weights)}
        return {"embed": list(self.embed.parameters()), **layers, "readout": list(self.readout.parameters())}


class ResidualStack(TrainingWorkload):
    """Trials that differ in any scalar but the seed share data, batch order and initial weights up to their scale."""

    Config = Config
    metrics = METRICS

    def run(self, config: Any, context: Context) -> Iterator[Report]:
        """Measures or trains a `Config`."""
        if config.task == "train":
            yield from super().run(config, context)
            return
        layers = measure(config, context)
        if (finding := describe_lost_digits(layers, config.dtype)) is not None:
            context.finding(finding)
        yield Report(1, metrics_of(layers))

    def check(self, config: Any, context: Context) -> Iterator[Finding]:
        """A measurement trains nothing: there is nothing to check."""
        return super().check(config, context) if config.task == "train" else iter(())

    def data(self, config: Any, context: Context) -> Regression:
        return draw_regression(context)

    def build(self, config: Any, data: Any, source: torch.Generator) -> StackRegression:
        return StackRegression(config, POLICIES[config.precision], source)

    def blocks(self, model: Any) -> Blocks:
        blocks: Blocks = model.blocks()
        return blocks

    def loss(self, call: Call, batch: Rows, hyper: Hyper) -> tuple[Tensor, None]:
        return F.mse_loss(call(batch.inputs_NI), batch.targets_NO), None

    def evaluate(self, config: Any, model: nn.Module, data: Any, hyper: Hyper) -> Mapping[str, float]:
        return {"val/mse": float(F.mse_loss(model(data.held_out.inputs_NI), data.held_out.targets_NO))}
