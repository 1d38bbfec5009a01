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
Call = Callable[..., Any]


class Batch(Protocol):
    @property
    def num_valid(self) -> float:
        """How much this batch counts in its window: rows, valid target tokens, or a sum of weights."""


Loss = Callable[[Call, Any, Hyper], tuple[Tensor, Any]]
Prepare = Callable[[Call, Sequence[Any], Hyper], Hyper]
Blocks = Mapping[str, Sequence[nn.Parameter]]


def weighted(coefficient: Scalar, loss: Callable[[], Scalar]) -> Scalar:
    """`coefficient * loss()`, and 0 for the plain number 0: off is off, also where the loss is not finite."""
    return 0.0 if isinstance(coefficient, int | float) and coefficient == 0 else coefficient * loss()


def nothing_to_prepare(call: Call, window: Sequence[Any], hyper: Hyper) -> Hyper:
    return hyper


@dataclass(frozen=True)
class Update:
    """What one update did.

    `loss` is the optimised loss over the whole window, not that of its last micro-batch. `norms` holds the gradient
    norm of every block and of `total`, unscaled and before the clip. `seen` is what the loss returned beside its value,
    one entry a micro-batch, with the micro-batch's share of the window. `weights` holds, for each micro-batch, what its
    loss counted in the gradient: the gradient that reached it, loss scale included; right is share * `loss_scale`.
    `left_over` says that gradients of an earlier update were still there when this one began. `applied_norm` is that of
    what the optimiser was given, unscaled and clipped; NaN if nobody has asked for it.
    """

    loss: Tensor
    norms: Mapping[str, float]
    applied: bool
    clipped: bool
    num_nonfinite_parameters: int
    seen: Sequence[tuple[float, Any]]
    weights: Sequence[Tensor] = ()
    loss_scale: float = 1.0
    left_over: bool = False
    applied_norm: float = math.nan


@dataclass
class Trainer:
    """What an update needs. `blocks` holds every trained parameter once; `schedules` follow applied updates only.

    `prepare` sees the whole window before its first backward pass, and may add to the hyperparameters what the loss of
    a micro-batch has to know of it. The methods are small so that a planted bug can be a subclass with one line.
    """

    call: Call
    loss: Loss
    blocks: Blocks
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    clip_norm: float | None = None
    schedules: Sequence[torch.optim.lr_scheduler.LRScheduler] = ()
    prepare: Prepare = nothing_to_prepare

    def __post_init__(self) -> None:
        self.parameters = [parameter for block in self.blocks.values() for parameter in block]
        self.weights: list[Tensor] = []
        self.is_watched = False  # whether `applied_norm` is wanted: it costs another pass over the gradient

    def update(self, window: Sequence[Batch], hyper: Hyper) -> Update:
        """Applies the window's gradient once, or not at all when it is not finite."""
        self.clear_gradients()
        left_over = has_gradient(self.parameters)
        loss, seen = self.accumulate(window, self.prepare(self.call, window, hyper))
        norms, clipped = self.unscale_and_clip()
        loss_scale, applied = self.scaler.get_scale(), math.isfinite(norms["total"])
        applied_norm = math.nan
        if applied and self.is_watched:
            applied_norm = self.watched_step()
        elif applied:
            self.step()
        self.scaler.update()  # halves the scale after a skipped step; unscale_ has recorded the overflow
        num_nonfinite = count_nonfinite(self.parameters)
        beside = (self.weights, loss_scale, left_over, applied_norm)
        return Update(loss, norms, applied, clipped, num_nonfinite, seen, *beside)

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def accumulate(self, window: Sequence[Batch], hyper: Hyper) -> tuple[Tensor, list[tuple[float, Any]]]:
        """Adds up the gradient of the window's mean over valid targets; returns that mean and what was seen."""
        num_valid = [micro.num_valid for micro in window]
        shares = [count / sum(num_valid) for count in num_valid]  # targets are the unit: micro-batches differ in size
        total, self.weights = torch.zeros(()), []
        seen: list[tuple[float, Any]] = []
        for micro, share, gradient_share in zip(window, shares, self.gradient_shares(shares), strict=True):
            loss, observed = self.loss(self.call, micro, hyper)
            # Whatever is done to the loss on its way to the gradient shows here.
            loss.register_hook(self.weights.append)  # type: ignore[no-untyped-call]
            self.backward(loss, gradient_share)
            total = total.to(loss) + loss.detach() * share
            seen.append((share, observed))
        return total, seen

    def gradient_shares(self, shares: Sequence[float]) -> Sequence[float]:
        """What each micro-batch's gradient counts, from its share of the window's valid targets."""
        return shares

    def backward(self, loss: Tensor, share: float) -> None:
        self.scaler.scale(loss * share).backward()  # type: ignore[no-untyped-call]

    def unscale_and_clip(self) -> tuple[dict[str, float], bool]:
        """The norms before the clip, and whether it had to act. A gradient that is not finite is left alone."""
        self.scaler.unscale_(self.optimizer)
        norms = gradient_norms(self.blocks)  # the clip would hide what we want to see
        # torch's own clip would turn (inf, 1) into (nan, 0) and step with it
        clipped = math.isfinite(norms["total"]) and clip_gradients(self.parameters, norms["total"], self.clip_norm)
        return norms, clipped

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.step_schedules()

    def watched_step(self) -> float:
        """Steps, and returns the norm of what the optimiser was given: stepping, it may change gradients in place."""
        seen = [math.nan]
        look = self.optimizer.register_step_pre_hook(lambda *_: seen.append(total_norm(self.parameters)))
        try:
            self.step()
        finally:
            look.remove()
        return seen[-1]

    def step_schedules(self) -> None:
        for schedule in self.schedules:
            schedule.step()


def has_gradient(parameters: Iterable[nn.Parameter]) -> bool:
    """True if any gradient is there and not zero."""
    return any(parameter.grad is not None and bool(dense_real(parameter.grad).any()) for parameter in parameters)


def dense_real(values: Tensor) -> Tensor:
    """The values in a form every kernel knows: those of a sparse tensor summed by place, complex ones as pairs."""
    if values.is_sparse:
        values = values.coalesce().values()
    return torch.view_as_real(values) if values.is_complex() else values


def gradient_norms(blocks: Blocks) -> dict[str, float]:
    """The gradient norm of each block, and `total` over all. A missing gradient counts as 0.

    Per tensor in float64: a float32 norm of a large CPU tensor is wrong by per cents, and squares of 1e20 overflow it.
    """
    parameters = [parameter for block in blocks.values() for parameter in block]
    gradients = [dense_real(parameter.grad) for parameter in parameters if parameter.grad is not None]
    measured = iter(_norms(gradients, torch.float64))
    squares = [0.0 if parameter.grad is None else next(measured) ** 2 for parameter in parameters]
    norms, start = {}, 0
    for name, block in blocks.items():
        norms[name] = math.sqrt(sum(squares[start : start + len(block)]))
        start += len(block)
    norms["total"] = math.sqrt(sum(squares))
    return norms


def total_norm(parameters: Iterable[nn.Parameter]) -> float:
    """The norm of all gradients together, as in `gradient_norms`."""
    gradients = [dense_real(parameter.grad) for parameter in parameters if parameter.grad is not None]
    return math.hypot(*_norms(gradients, torch.float64))


def _norms(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[float]:
    """The 2-norm of each tensor; one kernel call and one transfer, as torch's own get_total_norm does it."""
    if not tensors:
        return []
    norms: list[float] = torch.stack(torch._foreach_norm(list(tensors), 2, dtype)).tolist()
    return norms


def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, clip_norm: float | None) -> bool:
    """Scales all gradients in place so that their common norm is `clip_norm`; says whether it had to.

    `norm` is finite and measured. A factor below float32's smallest normal number is applied in float64: for gradients
    near 3e38 it would otherwise lose its digits.
    """
    if clip_norm is None or norm <= clip_norm:
        return False
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    factor = clip_norm / norm
    if factor >= torch.finfo(torch.float32).tiny:
        torch._foreach_mul_(gradients, factor)
    else:
        for gradient in gradients:
            gradient.copy_(gradient.double() * factor)
    return True


def count_nonfinite(parameters: Iterable[nn.Parameter]) -> int:
    """How many values of the parameters are NaN or infinite."""
    values = [dense_real(parameter.detach()) for parameter in parameters]
    if all(map(math.isfinite, _norms(values))):  # seven times cheaper than counting; huge values may overflow it
        return 0
    return int(torch.stack([torch.isfinite(value).logical_not().sum() for value in values]).sum())
