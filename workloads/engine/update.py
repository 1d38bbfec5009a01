"""One optimiser update, in the only order that is right: accumulate, unscale, measure, clip, step. Knows no model.

A loss is a function of (model call, batch, scalar hyperparameters). Training one trial calls it with the model itself;
training several as one model may call the same function under `torch.func.vmap`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Scalar = float | Tensor
Hyper = Mapping[str, Scalar]


class Batch(Protocol):
    @property
    def num_rows(self) -> int:
        """How much this batch counts in its window: rows here, valid tokens in a language model."""


Loss = Callable[[Callable[..., Any], Any, Hyper], tuple[Tensor, Any]]
Blocks = Mapping[str, Sequence[nn.Parameter]]


@dataclass(frozen=True)
class Update:
    """What one update did.

    `losses` is the optimised loss over the whole window, not that of its last micro-batch. `norms` holds the gradient
    norm of every block and of `total`, unscaled and before the clip. `seen` is what the loss returned beside its value,
    one entry a micro-batch, with the micro-batch's share of the window.
    """

    loss: Tensor
    norms: Mapping[str, float]
    applied: bool
    clipped: bool
    num_nonfinite_parameters: int
    seen: Sequence[tuple[float, Any]]


@dataclass(frozen=True)
class Trainer:
    """What an update needs. `blocks` holds every trained parameter once; `schedules` follow applied updates only."""

    call: Callable[..., Any]
    loss: Loss
    blocks: Blocks
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    clip_norm: float | None = None
    schedules: Sequence[torch.optim.lr_scheduler.LRScheduler] = ()

    def update(self, window: Sequence[Batch], hyper: Hyper) -> Update:
        """Applies the window's gradient once, or not at all when it is not finite."""
        self.optimizer.zero_grad(set_to_none=True)
        loss, seen = self._accumulate(window, hyper)
        self.scaler.unscale_(self.optimizer)
        norms = gradient_norms(self.blocks)
        applied = math.isfinite(norms["total"])  # torch's clip would turn (inf, 1) into (nan, 0) and step with it
        clipped = applied and clip_gradients(self._parameters(), norms["total"], self.clip_norm)
        if applied:
            self.scaler.step(self.optimizer)
            for schedule in self.schedules:
                schedule.step()
        self.scaler.update()  # halves the scale after a skipped step; unscale_ has recorded the overflow
        num_nonfinite = count_nonfinite(self._parameters())
        return Update(loss, norms, applied, clipped, num_nonfinite, seen)

    def _accumulate(self, window: Sequence[Batch], hyper: Hyper) -> tuple[Tensor, list[tuple[float, Any]]]:
        num_rows = sum(micro.num_rows for micro in window)
        total = torch.zeros(())
        seen: list[tuple[float, Any]] = []
        for micro in window:
            share = micro.num_rows / num_rows  # rows, not micro-batches, are the unit: the last one may be shorter
            loss, observed = self.loss(self.call, micro, hyper)
            self.scaler.scale(loss * share).backward()  # type: ignore[no-untyped-call]
            total = total.to(loss) + loss.detach() * share
            seen.append((share, observed))
        return total, seen

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for block in self.blocks.values() for parameter in block]


def gradient_norms(blocks: Blocks) -> dict[str, float]:
    """The gradient norm of each block, and `total` over all. A missing gradient counts as 0.

    Per tensor in float64: a float32 norm of a large CPU tensor is wrong by per cents, and squares of 1e20 overflow it.
    """
    squares = torch.stack([_square(parameter) for block in blocks.values() for parameter in block]).tolist()
    norms, start = {}, 0
    for name, block in blocks.items():
        norms[name] = math.sqrt(sum(squares[start : start + len(block)]))
        start += len(block)
    norms["total"] = math.sqrt(sum(squares))
    return norms


def _square(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros((), dtype=torch.float64, device=parameter.device)
    norm: Tensor = torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)
    return norm.square()


def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, clip_norm: float | None) -> bool:
    """Scales all gradients in place so that their common norm is `clip_norm`; says whether it had to.

    `norm` is finite and measured. The product is taken in float64: for gradients near 3e38 the factor is below
    float32's smallest normal number.
    """
    if clip_norm is None or norm <= clip_norm:
        return False
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.copy_(parameter.grad.double() * (clip_norm / norm))
    return True


def count_nonfinite(parameters: Iterable[nn.Parameter]) -> int:
    """How many values of the parameters are NaN or infinite."""
    with torch.no_grad():
        counts = [torch.isfinite(parameter).logical_not().sum() for parameter in parameters]
        return int(torch.stack(counts).sum())
