"""The standard probes as they see somebody else's loop: at looks, from what hooks told. Measure no more."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from orchestrator.trial import Finding, Severity
from workloads.engine.update import Update
from workloads.probes.gradients import GradientProbe
from workloads.probes.loss import LossProbe
from workloads.probes.loss_scale import LossScaleProbe
from workloads.probes.probe import Look

FAIR_CHANCE = 5  # times no_gradient_updates, before a parameter without gradient is called cut off: heads take turns
SAMPLED = 8192  # values of a matrix
WAIT = (
    "wait if it is used rarely; else look for detach(), no_grad(), or a part that is never called; "
    "freeze it if that is meant"
)


@dataclass(frozen=True)
class WatchedUpdate(Update):
    """An update of somebody else's loop: `applied_norm` is that of the gradient the optimiser was given, unscaled.

    `losses` are those that became known since the last look: (update, mean over its micro-batches); `fates` are
    (update, loss scale, applied). `counted` is what the losses of this update counted in its gradient, `num_lost` how
    many of them count nothing since their gradient was cleared before the step. `given_scale` is what the gradients
    that lie there behind the step are multiplied by, against the backward pass's: a fused optimiser takes its scale out
    of them too.
    """

    given_scale: float = 1.0
    was_unscaled: bool = True
    losses: Sequence[tuple[int, float]] = ()
    fates: Sequence[tuple[int, float, bool]] = ()
    counted: Sequence[float] = ()
    num_lost: int = 0
    router_norms: Mapping[str, float] = field(default_factory=dict)


NOTHING_SEEN = WatchedUpdate(torch.tensor(math.nan), {}, True, False, 0, ())


def watched(look: Look) -> WatchedUpdate:
    assert isinstance(look.update, WatchedUpdate)
    return look.update


@dataclass
class WatchedLoss(LossProbe):
    """Sees the losses the loop has handed over, at a look: a GPU is not waited for at every update."""

    def updated(self, look: Look) -> Iterator[Finding]:
        for step, loss in watched(look).losses:
            yield from self.see(step, loss)
            yield from self.held_out(step, loss, math.nan)
            if not math.isfinite(loss):
                message, advice = f"the loss is {loss}", "lower lr, clip the gradient, or look at this batch"
                yield Finding("nonfinite_update", Severity.WARNING, message, advice, step)

    def hear_held_out(self, step: int, loss: float) -> Iterator[Finding]:
        """A loss of data that is not trained on, against the last training losses."""
        yield from self.held_out(step, math.nan, loss)
        if not math.isfinite(loss):
            message, advice = f"the held-out loss is {loss}", "look at its batches, and at the parameters"
            yield Finding("nonfinite_update", Severity.WARNING, message, advice, step)


@dataclass
class WatchedScale(LossScaleProbe):
    """Sees every update's scale and fate, and at looks which share of the scaled gradient float16 cannot hold."""

    def updated(self, look: Look) -> Iterator[Finding]:
        update = watched(look)
        for step, scale, applied in update.fates:
            yield from self.see(step, scale, applied)
        if look.thorough and look.trainer.scaler.is_enabled() and update.applied and update.given_scale > 0:
            gradients = [one.grad for one in look.trainer.parameters if one.grad is not None]
            yield from self._lost(look.step, gradients, 1 / update.given_scale)


@dataclass
class WatchedGradients(GradientProbe):
    """Asks for the gradients of `blocks`, and of `strangers` that the optimiser has and the model has not."""

    strangers: Sequence[tuple[str, nn.Parameter]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._largest = dict(self._matrices)
        trained = {parameter for block in self.blocks.values() for parameter in block}
        self._named = [*((name, one) for name, one in self._named if one in trained), *self.strangers]

    def around(self, step: int) -> AbstractContextManager[Any]:
        """Of a large matrix every so many rows: a ratio from 8192 values is good to 1 %, and costs less."""
        self._matrices.update((name, every_so_many(one)) for name, one in self._largest.items())
        return super().around(step)

    def is_worried(self) -> bool:
        """True where every update counts: a gradient has been missing so far, or was zero at the update before."""
        return self.never is None or bool(self.never or self.zero_for)

    def updated(self, look: Look) -> Iterator[Finding]:
        """A part that is used now and then is no mistake yet."""
        patience = FAIR_CHANCE * self.thresholds.no_gradient_updates
        for finding in super().updated(look):
            is_early = finding.check_name == "no_gradient" and self.num_updates < patience
            yield replace(finding, severity=Severity.WARNING, advice=WAIT) if is_early else finding


def every_so_many(matrix: nn.Parameter) -> Any:
    """A view of evenly spread rows, of about `SAMPLED` values."""
    return matrix.detach()[:: -(-matrix.numel() // SAMPLED)]
