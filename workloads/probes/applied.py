"""Holds what an optimiser was given against the gradient it should have had. Knows norms and counts, no model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean

from orchestrator.trial import Finding, Severity
from workloads.probes.catalogue import Thresholds
from workloads.probes.probe import Look, Probe, listed_numbers
from workloads.probes.watched import WatchedUpdate, watched

LARGEST_CLIP = 50  # hardly anybody clips a gradient to more
CLIP_TOLERANCE = 0.25  # relative; torch's own clip takes norms in float32, on a CPU wrong by per cents
SAME = 1e-3  # relative; norms that a clip or a scale has made equal differ by rounding only
SMALLEST_SCALE = 8  # powers of two below it are also a mean over a few processes, or micro-batches
IN_A_ROW = 2  # looks: a loop may throw away a bad batch now and then, and its gradient with it


@dataclass
class AppliedProbe(Probe):
    """Is what the optimiser was given this update's gradient, finite, and clipped in the right order?"""

    clip_norm: float | None
    knows_scale: bool
    cut_to: float = field(init=False, default=0.0)  # what the clip left at the look before, still scaled

    def updated(self, look: Look) -> Iterator[Finding]:
        update = watched(look)
        if update.left_over:
            message = "a gradient of the update before was still there at this one's: it is applied again"
            advice = "call optimizer.zero_grad() once an update, before its first backward pass"
            yield Finding("gradients_not_cleared", Severity.ERROR, message, advice, look.step)
        if not look.thorough or not update.applied:
            return
        if not math.isfinite(update.applied_norm):
            message = f"the gradient that was applied has norm {update.applied_norm}"
            advice = "skip an update whose gradient is not finite; lower lr, or clip"
            yield Finding("nonfinite_update", Severity.ERROR, message, advice, look.step)
        elif update.applied_norm > 0 and math.isfinite(update.norms["total"]):
            yield from self._in_wrong_order(update, look.step)

    def _in_wrong_order(self, update: WatchedUpdate, step: int) -> Iterator[Finding]:
        before, applied, scale = update.norms["total"], update.applied_norm, update.loss_scale
        if scale != 1 and not update.was_unscaled and is_near(applied, before * scale, SAME):
            message = f"the optimiser was given gradients that are still multiplied by the loss scale, {scale:g}"
            advice = "call scaler.step(optimizer) and scaler.update() instead of optimizer.step()"
            yield Finding("loss_factor", Severity.ERROR, message, advice, step, applied / before, 1.0)
        elif self.knows_scale and self.clip_norm and self._clipped_scaled(update, self.clip_norm):
            message = f"gradients were clipped to {self.clip_norm:g} while they were multiplied by the loss scale"
            message += f", {scale:g}; the optimiser was given norm {applied:.3g}"
            yield self._clip_order(message, Severity.ERROR, step, applied, min(before, self.clip_norm))
        elif not self.knows_scale and (factor := hidden_scale(before, applied)):
            message = f"gradients are divided by {factor:.0f} between the backward pass and the step"
            yield self._hidden(message, step, factor)
        elif self.clip_norm is not None:
            yield from self._against(update, self.clip_norm, step)
        elif self.knows_scale:
            yield from self._implausible(before, applied, scale, step)

    def _clipped_scaled(self, update: WatchedUpdate, clip_norm: float) -> bool:
        """A clip before the scaler's division, or instead of it."""
        applied, scaled = update.applied_norm, update.norms["total"] * update.loss_scale
        if update.loss_scale == 1 or scaled < clip_norm:
            return False
        left = applied if not update.was_unscaled else applied * update.loss_scale
        return is_near(left, clip_norm, CLIP_TOLERANCE)

    def _against(self, update: WatchedUpdate, clip_norm: float, step: int) -> Iterator[Finding]:
        """The norm that was applied, against that of the whole gradient, clipped once."""
        before, applied, due = update.norms["total"], update.applied_norm, min(update.norms["total"], clip_norm)
        if is_near(applied, due, CLIP_TOLERANCE):
            return
        message = f"the applied gradient has norm {applied:.3g}; {before:.3g} clipped to {clip_norm:g} is {due:.3g}"
        if is_near(applied, before, SAME):
            advice = "it was not clipped: clip all parameters by their common norm, after the last backward pass"
            yield Finding("clip_order", Severity.ERROR, message, advice, step, applied, due)
        elif applied > due:
            advice = "nothing to do if the loop adds noise, or clips each layer by itself: clip_norm= is that of one"
            advice += " clip over all; else clip once an update, after its last backward pass"
            yield Finding("clip_order", Severity.INFO, message, advice, step, applied, due)
        elif not self.knows_scale and hidden_scale(clip_norm, applied, SAME):
            message += f": clipped, and then divided by {clip_norm / applied:.0f}"
            yield self._clip_order(message, Severity.ERROR, step, applied, due)
        else:
            advice = "nothing to do if the loop divides gradients by hand, clips each layer by itself or clips values:"
            advice += " clip_norm= is that of one clip over all, leave it out; else look what is between"
            yield Finding("clip_order", Severity.INFO, message, advice, step, applied, due)

    def _implausible(self, before: float, applied: float, scale: float, step: int) -> Iterator[Finding]:
        """Without `clip_norm` a clip of scaled gradients shows twice in a row as a round norm, once scaled again."""
        seen, self.cut_to = self.cut_to, applied * scale
        is_cut = scale > 1 and applied < before / 10 and is_near(self.cut_to, seen, SAME)
        if is_cut and is_round(self.cut_to) and not is_round(applied):
            message = f"of a gradient of norm {before:.3g}, {applied:.3g} was applied: what a clip to"
            message += f" {self.cut_to:.3g} leaves of it when it sees it {scale:g} times too large"
            yield self._clip_order(message, Severity.WARNING, step, applied, None)

    def _clip_order(self, message: str, severity: Severity, step: int, applied: float, due: float | None) -> Finding:
        advice = "scaler.unscale_(optimizer) first, then clip, then scaler.step(optimizer)"
        return Finding("clip_order", severity, message, advice, step, applied, due)

    def _hidden(self, message: str, step: int, factor: float) -> Finding:
        advice = "if a GradScaler does it, hand it over (scaler=): norms are not what they seem without it; if the loop"
        advice += " divides by its number of micro-batches, grad/preclip is that of their sum"
        return Finding("loss_factor", Severity.INFO, message, advice, step, factor, 1.0)


@dataclass
class CountedProbe(Probe):
    """Does each loss that was handed over before its backward pass count in the gradient what it should?"""

    thresholds: Thresholds
    knows_scale: bool
    num_wrong: int = field(init=False, default=0)  # looks in a row
    num_cleared: int = field(init=False, default=0)  # looks in a row

    def updated(self, look: Look) -> Iterator[Finding]:
        update = watched(look)
        if not look.thorough:
            return
        self.num_cleared = self.num_cleared + 1 if update.num_lost else 0
        if self.num_cleared >= IN_A_ROW:
            message = f"of this update's losses, the gradients of {update.num_lost} were cleared before the step"
            advice = "call optimizer.zero_grad() once an update, not once a micro-batch"
            yield Finding("accumulation_weights", Severity.ERROR, message, advice, look.step, 0.0, 1.0)
        is_wrong = self._factor(update) is not None
        self.num_wrong = self.num_wrong + 1 if is_wrong else 0
        if is_wrong and self.num_wrong >= IN_A_ROW:
            yield self._told(update, look.step)

    def _factor(self, update: WatchedUpdate) -> float | None:
        """What the losses count too much, or None: right are 1 each and 1 together, also if a scale is taken out."""
        counted, tolerance = update.counted, self.thresholds.weight_tolerance
        if not counted or not all(map(math.isfinite, counted)):
            return None
        reduction = update.norms["total"] / update.applied_norm if update.applied_norm > 0 else 1.0
        for one in (1.0, reduction):
            if is_near(sum(counted), one, tolerance) or all(is_near(count, one, tolerance) for count in counted):
                return None
        return fmean(counted) if min(counted) > 1 else sum(counted)

    def _told(self, update: WatchedUpdate, step: int) -> Finding:
        counted, factor = update.counted, self._factor(update)
        assert factor is not None
        message = (
            f"the losses handed over count {listed_numbers(counted)} in the gradient, neither 1 each nor 1 together"
        )
        advice = "hand over the loss that backward() starts from; if it is that, look for a factor in between"
        if not all(is_near(count, counted[0], self.thresholds.weight_tolerance) for count in counted):
            return Finding("accumulation_weights", Severity.WARNING, message, advice, step, sum(counted), 1.0)
        reduction = update.norms["total"] / update.applied_norm if update.applied_norm > 0 else 1.0
        if not self.knows_scale and hidden_scale(counted[0], 1.0) and reduction > counted[0] * (1 - SAME):
            advice = "if a GradScaler does it, hand it over (scaler=)"
            return Finding("loss_factor", Severity.INFO, message, advice, step, factor, 1.0)
        severity = Severity.ERROR if factor > 1 else Severity.WARNING  # less than 1 may be a part of the loss
        return Finding("loss_factor", severity, message, advice, step, factor, 1.0)


def nonfinite_parameters(num: int, step: int) -> Finding:
    message, advice = f"{num} parameter values are not finite", "lower lr, or clip; go back to an earlier checkpoint"
    return Finding("nonfinite_update", Severity.ERROR, message, advice, step, float(num), 0.0)


def is_near(value: float, due: float, tolerance: float) -> bool:
    return abs(value - due) <= tolerance * abs(due)


def is_round(value: float) -> bool:
    """True for numbers that people clip to: one digit and zeros, not too large."""
    return value <= LARGEST_CLIP * (1 + SAME) and is_near(value, float(f"{value:.0e}"), SAME)


def hidden_scale(before: float, applied: float, tolerance: float = 1e-6) -> float | None:
    """before / applied if that is a power of two from 8 on, as loss scales are; clips do not meet one to six digits."""
    if not math.isfinite(before) or applied <= 0 or before < (SMALLEST_SCALE - 1) * applied:
        return None
    power = math.log2(before / applied)
    return 2.0 ** round(power) if abs(power - round(power)) < tolerance else None
