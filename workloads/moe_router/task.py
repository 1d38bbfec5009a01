"""The synthetic regression: Gaussian clusters, each with its own linear map. Draws data; trains nothing.

Axes: N rows, C clusters, I inputs, O outputs. Which cluster a row belongs to is hidden from the model, so a mixture of
experts has something to find. Source of the sizes: a search for a task on which the router z-loss behaves as published.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from workloads.engine.random import normal

NUM_CLUSTERS = 8
NUM_INPUTS = 16
NUM_OUTPUTS = 8
NUM_TRAIN = 4096
NUM_TEST = 2048
BIAS_SCALE = 0.3


class Batch(NamedTuple):
    """Rows of the task: inputs [N, I], targets [N, O], float32."""

    inputs_NI: Tensor
    targets_NO: Tensor

    @property
    def num_valid(self) -> int:
        return len(self.inputs_NI)

    def to(self, device: str) -> Batch:
        return Batch(self.inputs_NI.to(device), self.targets_NO.to(device))

    def rows(self, indices: Tensor) -> Batch:
        return Batch(self.inputs_NI[indices], self.targets_NO[indices])


@dataclass(frozen=True)
class Task:
    """What is to be learned. `mean_O` and `std_O` come from a sample of their own."""

    centres_CI: Tensor
    maps_CIO: Tensor
    biases_CO: Tensor
    spread: float
    scale: float
    noise: float
    mean_O: Tensor
    std_O: Tensor

    def draw(self, num_rows: int, source: torch.Generator) -> Batch:
        """Fresh rows: inputs around the centres, standardised targets times `scale`, plus label noise."""
        inputs_NI, clean_NO = _draw_clean(self.centres_CI, self.maps_CIO, self.biases_CO, self.spread, num_rows, source)
        targets_NO = (clean_NO - self.mean_O) / self.std_O * self.scale
        return Batch(inputs_NI, targets_NO + self.noise * normal((num_rows, NUM_OUTPUTS), source))


def draw_task(task_seed: int, spread: float, scale: float, noise: float) -> Task:
    """Centres from N(0, 1), maps that keep the variance of their input, small biases.

    The task belongs to the question and not to the replicate: tasks differ in how hard they are to route (mean squared
    errors of .05 to .45 at the same settings), which would bury what differs between settings.
    """
    source = torch.Generator().manual_seed(task_seed)
    centres_CI = normal((NUM_CLUSTERS, NUM_INPUTS), source)
    maps_CIO = normal((NUM_CLUSTERS, NUM_INPUTS, NUM_OUTPUTS), source) / math.sqrt(NUM_INPUTS)
    biases_CO = BIAS_SCALE * normal((NUM_CLUSTERS, NUM_OUTPUTS), source)
    _, clean_NO = _draw_clean(centres_CI, maps_CIO, biases_CO, spread, NUM_TRAIN, source)
    return Task(centres_CI, maps_CIO, biases_CO, spread, scale, noise, clean_NO.mean(0), clean_NO.std(0))


def _draw_clean(
    centres_CI: Tensor, maps_CIO: Tensor, biases_CO: Tensor, spread: float, num_rows: int, source: torch.Generator
) -> tuple[Tensor, Tensor]:
    clusters_N = torch.randint(NUM_CLUSTERS, (num_rows,), generator=source)
    inputs_NI = centres_CI[clusters_N] + spread * normal((num_rows, NUM_INPUTS), source)
    every_CNO = torch.einsum("ni,cio->cno", inputs_NI, maps_CIO) + biases_CO.unsqueeze(1)
    return inputs_NI, every_CNO[clusters_N, torch.arange(num_rows)]
