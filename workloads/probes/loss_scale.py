"""Watches a loss scaler and what it saves from underflow. Does nothing where the loss is not scaled."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from orchestrator.trial import Finding, Severity
from workloads.engine.update import dense_real
from workloads.probes.catalogue import Thresholds
from workloads.probes.probe import Look, Probe


@dataclass
class LossScaleProbe(Probe):
    """Sees whether each update was applied, and at thorough looks the gradient."""

    thresholds: Thresholds
    num_applied: int = field(init=False, default=0)
    num_skipped: int = field(init=False, default=0)  # in a row
    num_lost: int = field(init=False, default=0)  # thorough looks in a row with much underflow
    shares: dict[str, float] = field(init=False, default_factory=dict)

    def updated(self, look: Look) -> Iterator[Finding]:
        if not look.trainer.scaler.is_enabled():
            return
        self.shares = {}  # those of an earlier update are not this one's
        yield from self.see(look.step, look.update.loss_scale, look.update.applied)
        if look.thorough:
            gradients = [one.grad for one in look.trainer.parameters if one.grad is not None]
            clip = look.trainer.clip_norm if look.update.clipped else None
            factor = 1.0 if clip is None else clip / look.update.norms["total"]
            yield from self._lost(look.step, gradients, look.update.loss_scale / factor)

    def measured(self) -> Mapping[str, float]:
        return self.shares

    def see(self, step: int, scale: float, applied: bool) -> Iterator[Finding]:
        """The scale an update used, and whether the update was applied.

        One skip now and then is how a scaler finds its limit: it doubles its scale every 2000 updates. Two in a row,
        once the scale had settled, mean that gradients grow faster than the scale shrinks.
        """
        self.num_applied += applied
        self.num_skipped = 0 if applied else self.num_skipped + 1
        if self.num_skipped >= 2 and self.num_applied >= self.thresholds.scaler_grace_updates:
            message = f"{self.num_skipped} updates in a row were skipped; the loss scale was {scale:g}"
            advice = "gradients overflow float16 again and again: lower lr, set clip_norm, or use a bf16 precision"
            yield Finding("scaler_skips", Severity.WARNING, message, advice, step, float(self.num_skipped), 2.0)

    def _lost(self, step: int, gradients: Iterable[Tensor], scale: float) -> Iterator[Finding]:
        underflow, overflow = lost_shares(gradients, scale)
        self.shares = {"grad/underflow_share": underflow, "grad/overflow_share": overflow}
        limit = self.thresholds.underflow_share
        self.num_lost = self.num_lost + 1 if underflow > limit else 0
        if self.num_lost >= self.thresholds.underflow_looks:
            message = f"{underflow:.0%} of the gradient's values, scaled by {scale:g}, were too small for float16"
            advice = "raise the loss scale: a scaler that starts at 65536 keeps most; or use a bf16 precision"
            yield Finding("gradient_underflow", Severity.WARNING, message, advice, step, underflow, limit)


def lost_shares(gradients: Iterable[Tensor], scale: float) -> tuple[float, float]:
    """Which share of a gradient's values underflowed in float16, and which is not finite.

    A value underflows when, scaled, it is below float16's smallest normal number, 2^-14: it has lost digits, and below
    2^-25 all of them, which makes it 0. Rows and columns that are 0 throughout do not count: symbols that were not in
    the batch, experts without a token, units that no ReLU lets through, and, not to be told from these, what was lost
    altogether; the share is a lower bound. A vector is a row, so that none of its zeros count.
    """
    tiny = torch.finfo(torch.float16).tiny / scale if scale > 0 else math.inf  # after 166 skips in a row a scale is 0
    tensors = [gradient for gradient in map(dense_real, gradients) if gradient.numel()]
    if not tensors:
        return 0.0, 0.0
    small, living, finite = torch.stack([_counts(gradient, tiny) for gradient in tensors]).sum(0).tolist()
    return small / max(living, 1), 1 - finite / sum(gradient.numel() for gradient in tensors)


def _counts(gradient: Tensor, tiny: float) -> Tensor:
    """Values that are too small, values in rows and columns that are not 0, and values that are finite; int64 [3]."""
    rows = gradient.reshape(-1, gradient.shape[-1]) if gradient.dim() else gradient.reshape(1, 1)
    lives = rows.any(-1, keepdim=True) & rows.any(0)
    return torch.stack([((rows.abs() < tiny) & lives).sum(), lives.sum(), rows.isfinite().sum()])
