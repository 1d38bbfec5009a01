"""Probes of gradients and of what an update does with them. They measure, and repair nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.trial import Finding, Severity
from workloads.probes.catalogue import Thresholds
from workloads.probes.probe import Look, Probe, listed, listed_numbers

SAMPLED_VALUES = 2**20  # of a block, when its update is held against its weights: a copy of more costs memory


def misweighed(
    counted: Sequence[float], shares: Sequence[float], tolerance: float, step: int | None
) -> Iterator[Finding]:
    """What each micro-batch's loss counted in the gradient, against its share of the window's valid targets.

    All losses times the same factor is one disease, a wrong weight for each another; that every loss counts 1, so that
    the gradient is a sum, is the second, also where the micro-batches are of equal size.
    """
    pairs = [(have, due) for have, due in zip(counted, shares, strict=True) if due > 0]
    if not pairs or all(abs(have - due) <= tolerance * due for have, due in pairs):
        return
    factors = [have / due for have, due in pairs]
    factor = sum(factors) / len(factors)
    is_sum = len(pairs) > 1 and all(abs(have - 1) <= tolerance for have, _ in pairs)
    if not is_sum and all(abs(one - factor) <= tolerance * abs(factor) for one in factors):
        message = f"the gradient is {factor:.4g} times that of the loss that is reported"
        advice = "look at what stands between the loss and backward(): a factor, a sum instead of a mean, a loss scale"
        yield Finding("loss_factor", Severity.ERROR, message, advice, step, factor, 1.0)
        return
    worst = max(pairs, key=lambda pair: abs(pair[0] / pair[1] - 1))
    have, due = listed_numbers(counted), listed_numbers(shares)
    message = f"micro-batches count {have} in the gradient; their shares of valid targets are {due}"
    advice = "weigh each micro-batch's mean loss by its valid targets over those of the whole window"
    yield Finding("accumulation_weights", Severity.ERROR, message, advice, step, worst[0] / worst[1], 1.0)


def wrongly_clipped(
    before: float, applied: float, clip_norm: float | None, tolerance: float, step: int | None
) -> Iterator[Finding]:
    """The norm of the gradient that was applied, against that of the unscaled gradient, clipped; NaN was not seen."""
    due = before if clip_norm is None else min(before, clip_norm)
    if not math.isfinite(due) or math.isnan(applied) or abs(applied - due) <= tolerance * due:
        return
    message = f"the applied gradient has norm {applied:.3g}; {before:.3g} clipped to {clip_norm} is {due:.3g}"
    advice = "unscale the gradient first (scaler.unscale_), then clip it, then step; once an update"
    yield Finding("clip_order", Severity.ERROR, message, advice, step, applied, due)


@dataclass
class UpdateProbe(Probe):
    """Is the update made in the right order, of the right gradient, once?"""

    thresholds: Thresholds
    num_updates: int = field(init=False, default=0)
    num_applied: int = field(init=False, default=0)
    num_clipped: int = field(init=False, default=0)  # in a row

    def updated(self, look: Look) -> Iterator[Finding]:
        self.num_updates += 1
        self.num_applied += look.update.applied
        if self.num_updates == 1 < look.step:  # it was not there from the start: where the schedule stands is believed
            self.num_applied = max((schedule.last_epoch for schedule in look.trainer.schedules), default=0)
        self.num_clipped = self.num_clipped + 1 if look.update.clipped else 0
        if look.update.left_over:
            message = "the gradient of the update before was still there when this one began: it is applied again"
            advice = "call optimizer.zero_grad() once an update, before its first backward pass"
            yield Finding("gradients_not_cleared", Severity.ERROR, message, advice, look.step)
        for schedule in look.trainer.schedules:
            if schedule.last_epoch != self.num_applied:
                yield self._out_of_step(look.step, schedule.last_epoch)
        if self.num_clipped == self.thresholds.clip_always_updates:
            norm, clip_norm = look.update.norms["total"], look.trainer.clip_norm
            message = f"the clip acted on the last {self.num_clipped} updates; the gradient's norm is {norm:.3g}"
            advice = "lr alone sets the length of every update now: raise clip_norm, or read grad/preclip/total"
            yield Finding("clip_always", Severity.INFO, message, advice, look.step, norm, clip_norm)
        if look.thorough:
            yield from self._weights(look)

    def _weights(self, look: Look) -> Iterator[Finding]:
        tolerance = self.thresholds.weight_tolerance
        if look.update.loss_scale > 0:  # a scale that was halved until it was nothing: another finding's matter
            counted = [weight / look.update.loss_scale for weight in _floats(look.update.weights)]
            yield from misweighed(counted, [share for share, _ in look.update.seen], tolerance, look.step)
        before, clip_norm = look.update.norms["total"], look.trainer.clip_norm
        yield from wrongly_clipped(before, look.update.applied_norm, clip_norm, tolerance, look.step)

    def _out_of_step(self, step: int, stands_at: int) -> Finding:
        message = f"after {self.num_applied} applied updates the schedule stands at {stands_at}"
        advice = "step the schedule once for each update that was applied, not for each micro-batch or skipped one"
        return Finding(
            "schedule_pace", Severity.ERROR, message, advice, step, float(stands_at), float(self.num_applied)
        )


def _floats(tensors: Sequence[Tensor]) -> list[float]:
    values: list[float] = torch.stack([tensor.detach().double() for tensor in tensors]).tolist() if tensors else []
    return values


@dataclass
class GradientProbe(Probe):
    """Does every parameter get a gradient, and does its update suit its size?"""

    thresholds: Thresholds
    model: nn.Module
    blocks: Mapping[str, Sequence[nn.Parameter]]
    num_updates: int = field(init=False, default=0)  # that it has looked for a gradient at
    never: list[str] | None = field(init=False, default=None)  # parameters that have not received a gradient so far
    zero_for: dict[str, int] = field(init=False, default_factory=dict)  # block -> updates in a row
    num_too_large: int = field(init=False, default=0)  # thorough looks in a row

    def __post_init__(self) -> None:
        self._named = [(name, one) for name, one in self.model.named_parameters() if one.requires_grad]
        self._matrices = dict(largest_matrices(self.blocks))
        self._before: dict[str, Tensor] = {}
        self._ratios: dict[str, float] = {}

    def around(self, step: int) -> AbstractContextManager[Any]:
        """Keeps the weights as they are before the update."""
        self._before = {name: sampled(one).clone() for name, one in self._matrices.items()}
        return nullcontext()

    def updated(self, look: Look) -> Iterator[Finding]:
        if self.never is None or self.never:
            yield from self._without_gradient(look.step)
        norms = look.update.norms
        if self.zero_for or 0.0 in norms.values():
            zero = [name for name, norm in norms.items() if norm == 0 and self._has_gradient(name)]
            yield from self._zero(look.step, zero)
        if self._before:
            after = {name: sampled(one) for name, one in self._matrices.items()}
            self._ratios, self._before = update_ratios(self._before, after), {}
            yield from self._too_large(look)

    def measured(self) -> Mapping[str, float]:
        ratios, self._ratios = self._ratios, {}  # a report between two thorough looks has none
        return {f"update/ratio/{name}": ratio for name, ratio in ratios.items()}

    def _without_gradient(self, step: int) -> Iterator[Finding]:
        """What has received one once is in the graph: an expert that no token chose for a while is not cut off."""
        absent = [name for name, parameter in self._named if parameter.grad is None]
        self.never = [name for name in absent if self.never is None or name in self.never]
        self.num_updates += 1
        if self.never and self.num_updates >= self.thresholds.no_gradient_updates:
            message = (
                f"{listed(self.never)}: no gradient in {self.num_updates} updates; the loss does not depend on what is "
                "there"
            )
            advice = "look for detach(), no_grad(), or a part that is never called; freeze it if that is meant"
            yield Finding("no_gradient", Severity.ERROR, message, advice, step, float(len(self.never)), 0.0)

    def _zero(self, step: int, zero: Sequence[str]) -> Iterator[Finding]:
        """A gradient that is there and exactly zero; not the same as none, and not the same as a small one."""
        self.zero_for = {name: self.zero_for.get(name, 0) + 1 for name in zero}
        limit = self.thresholds.zero_gradient_updates
        if dead := [name for name, count in self.zero_for.items() if count >= limit]:
            count = max(self.zero_for.values())
            message = f"{listed(dead)}: the gradient was exactly zero in {limit:.0f} updates"
            advice = "a saturated or cut-off part, a factor of zero, or underflow: nothing there is learned"
            yield Finding("zero_gradient", Severity.WARNING, message, advice, step, float(count), limit)

    def _has_gradient(self, block: str) -> bool:
        return any(one.grad is not None for one in self.blocks.get(block, [one for _, one in self._named]))

    def _too_large(self, look: Look) -> Iterator[Finding]:
        limit, ratio = self.thresholds.update_ratio, self._ratios.get("total", 0.0)
        self.num_too_large = self.num_too_large + 1 if math.isfinite(ratio) and ratio > limit else 0
        if self.num_too_large >= 2 and look.step > self.thresholds.update_ratio_grace:
            message = f"an update is {ratio:.3g} times as long as the weights it changes"
            yield Finding("update_too_large", Severity.WARNING, message, "lower lr", look.step, ratio, limit)


def largest_matrices(blocks: Mapping[str, Sequence[nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
    """Each block's largest matrix; biases and norms often start at 0 and have no length yet."""
    for name, block in blocks.items():
        if matrices := [one for one in block if one.dim() >= 2 and one.is_floating_point()]:
            yield name, max(matrices, key=Tensor.numel)


def sampled(parameter: Tensor) -> Tensor:
    values = parameter.detach()
    return values if values.numel() <= SAMPLED_VALUES else values.flatten()[:SAMPLED_VALUES]


def update_ratios(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, float]:
    """Length of the update over that of the weights, by block and in `total`; a block of zeros has none."""
    olds, moves = list(before.values()), torch._foreach_sub([after[name] for name in before], list(before.values()))
    norms = torch.stack(torch._foreach_norm([*moves, *olds], 2, torch.float64)).tolist()  # one transfer
    pairs = dict(zip(before, zip(norms[: len(olds)], norms[len(olds) :], strict=True), strict=True))
    pairs["total"] = math.hypot(*norms[: len(olds)]), math.hypot(*norms[len(olds) :])
    return {name: moved / length for name, (moved, length) in pairs.items() if length > 0}
