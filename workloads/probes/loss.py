"""Watches the loss: spikes, a plateau, a training loss that is too good. Looks at numbers only, at no model.

What is not finite enters no statistic, and neither does a spike: one bad value must not blind the watch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median

from orchestrator.trial import Finding, Severity
from workloads.probes.catalogue import NEVER, Thresholds
from workloads.probes.probe import Look, Probe

ROBUST_SIGMA = 1.4826  # of a normal distribution, in median absolute deviations
ENOUGH_VALUES = 32  # before a value is judged; a shorter window is enough when it is full
BLOCK = 25  # updates that one point of the loss's course stands for
RECENT_REPORTS = 5  # that the training loss is the median of, when it is held against the held-out one

TASK_LOSSES = ("train/cross_entropy", "train/mse", "train/loss")  # the task's own, without auxiliary terms, comes first
HELD_OUT_LOSSES = ("val/loss", "val/mse")


@dataclass
class LossProbe(Probe):
    """Sees the loss of every update, and at reports the held-out one."""

    thresholds: Thresholds
    recent: list[float] = field(init=False, default_factory=list)  # finite, spikes left out
    beyond: list[float] = field(init=False, default_factory=list)  # the latest values, all of them spikes
    block: list[float] = field(init=False, default_factory=list)
    course: list[float] = field(init=False, default_factory=list)  # medians of blocks
    reported_losses: list[float] = field(init=False, default_factory=list)
    first_held_out: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._window = max(1, int(self.thresholds.spike_window))
        is_asked = self.thresholds.spike_sigmas < NEVER
        self._enough = min(ENOUGH_VALUES, self._window) if is_asked else math.inf

    def updated(self, look: Look) -> Iterator[Finding]:
        return self.see(look.step, float(look.update.loss))

    def reported(self, step: int, metrics: Mapping[str, float]) -> Iterator[Finding]:
        train = next((metrics[name] for name in TASK_LOSSES if name in metrics), math.nan)
        held_out = next((metrics[name] for name in HELD_OUT_LOSSES if name in metrics), math.nan)
        yield from self.held_out(step, train, held_out)

    def see(self, step: int, loss: float) -> Iterator[Finding]:
        """The loss of one update; says when it is a spike, and when the loss has stopped falling."""
        if not math.isfinite(loss):
            return
        if excess := self._excess(loss):
            self.beyond.append(loss)
            yield self._spike(step, loss, *excess)
            if len(self.beyond) >= self.thresholds.spike_new_level:  # no spikes: the loss has moved there
                self.recent, self.beyond = self.beyond[-self._window :], []
        else:
            self.beyond = []
            self.recent.append(loss)
            del self.recent[: -self._window]
        self.block.append(loss)
        if len(self.block) == BLOCK:
            yield from self._plateau(step)

    def _spike(self, step: int, loss: float, normal: float, limit: float) -> Finding:
        """A single batch may be odd; two in a row, or one that is out of all proportion, is the model's doing."""
        is_odd_batch = len(self.beyond) < 2 and loss - normal < self.thresholds.spike_proportion * (limit - normal)
        severity = Severity.INFO if is_odd_batch else Severity.WARNING
        lasting = f" for {len(self.beyond)} updates" if len(self.beyond) > 1 else ""
        message = f"the loss is {loss:.4g}, far above its recent {normal:.4g}{lasting}"
        advice = "lower lr or clip_norm, or look at the batches of these steps; a few spikes that pass do little harm"
        return Finding("loss_spike", severity, message, advice, step, loss, limit)

    def _excess(self, loss: float) -> tuple[float, float] | None:
        """The median and the limit if `loss` is beyond it.

        A spike stands out threefold: by robust sigmas; by a share of the median, since an all but constant loss has
        hardly a sigma; and by its distance over that of the worst recent value, since losses of few rows have long
        tails.
        """
        recent = self.recent
        if len(recent) < self._enough or loss <= recent[-1] or loss <= recent[0] or loss <= (worst := max(recent)):
            return None  # mostly told by one that is higher
        normal = median(recent)
        sigma = ROBUST_SIGMA * median(abs(value - normal) for value in recent)
        limits = self.thresholds
        limit = normal + max(
            limits.spike_sigmas * sigma, limits.spike_excess * abs(normal), limits.spike_over_worst * (worst - normal)
        )
        return (normal, limit) if loss > limit else None

    def _plateau(self, step: int) -> Iterator[Finding]:
        """Called when a block is full."""
        block, self.block = self.block, []
        if self.thresholds.plateau_updates >= NEVER:
            return
        half = max(1, int(self.thresholds.plateau_updates) // (2 * BLOCK))
        self.course = [*self.course[1 - 2 * half :], median(block)]
        if len(self.course) < 2 * half:
            return
        before, after = median(self.course[:half]), median(self.course[half:])
        gain, limit = before - after, self.thresholds.plateau_gain * abs(before)
        if gain < limit:
            message = f"the loss has gone from {before:.4g} to {after:.4g} in the last {2 * half * BLOCK} updates"
            advice = "it may be done; else try another lr, or a schedule that lowers it"
            yield Finding("loss_plateau", Severity.INFO, message, advice, step, gain, limit)

    def held_out(self, step: int, train: float, held_out: float) -> Iterator[Finding]:
        """The training loss of a report, and the held-out one if it was measured (else NaN); both at least 0."""
        if math.isfinite(train):
            self.reported_losses = [*self.reported_losses[1 - RECENT_REPORTS :], train]
        if not math.isfinite(held_out) or not self.reported_losses:
            return
        self.first_held_out = held_out if self.first_held_out is None else self.first_held_out
        recent, limit = median(self.reported_losses), self.thresholds.too_good_share * held_out
        if not 0 <= recent < limit:
            return
        worse = held_out > self.first_held_out
        message = f"the training loss is {recent:.3g}, the held-out one {held_out:.3g}"
        message += f"; that has risen from {self.first_held_out:.3g}" if worse else ""
        advice = "it learns its data by heart: stop earlier, or take more data; or are the targets among the inputs?"
        yield Finding("loss_too_good", Severity.WARNING, message, advice, step, recent, limit)
