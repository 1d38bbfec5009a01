"""What probes and checks can find, and the limits they hold it against. Imports no torch, finds nothing.

A sweep changes a limit with `health: {thresholds: {spike_sigmas: 8}}` and ends runs on findings with
`stop: {on: [loss_spike]}`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

NEVER = sys.float_info.max  # what `.inf` in a sweep file becomes, for JSON has no infinity


@dataclass(frozen=True)
class Sense:
    """Which values a limit may have, in words and in numbers; `is_whole`: a count."""

    words: str
    least: float = 0.0
    most: float = NEVER
    is_whole: bool = False

    def admits(self, value: float) -> bool:
        is_in_range = self.least <= value <= self.most
        return is_in_range and (not self.is_whole or value >= NEVER or value % 1 == 0)


class Limit(float):
    """A default that knows which values may stand in its place; see `orchestrator.spec.health.Bounded`."""

    sense: Sense

    @classmethod
    def of(cls, default: float, sense: Sense) -> Limit:
        limit = cls(default)
        limit.sense = sense
        return limit

    def refusal(self, value: float) -> str:
        """What would be right, in words; empty if `value` is."""
        return "" if self.sense.admits(value) else self.sense.words


def _limit(default: float, *sense: Any) -> Any:
    return field(default=default, metadata={"sense": Sense(*sense)})


def number(default: float) -> Any:
    return _limit(default, "a finite number, at least 0", 0.0, NEVER / 2)


def ceiling(default: float) -> Any:
    """What nothing healthy goes beyond."""
    return _limit(default, "a number, at least 0, or .inf for never")


def share(default: float, never: str = "1 for never", least: float = 0.0) -> Any:
    return _limit(default, f"a share, from {least:g} to 1" + f" ({never})" * bool(never), least, 1.0)


def patience(default: float, of: str = "updates", least: int = 1) -> Any:
    """How long a thing has to last until it is told."""
    return _limit(default, f"a count of {of}, at least {least}, or .inf for never", float(least), NEVER, True)


def window(default: float, least: int) -> Any:
    """How many updates are kept."""
    return _limit(default, f"a count of updates, from {least} to 1000000", float(least), 1e6, True)


@dataclass(frozen=True)
class Thresholds:
    """The named limits, each with the reason for its default."""

    # Loss. A robust sigma is 1.4826 times the median absolute deviation, which a spike itself cannot inflate.
    spike_sigmas: float = ceiling(6.0)  # OLMo's spike score uses 6 standard deviations too
    spike_window: float = window(128.0, least=8)  # updates that the median is taken over; 128 in OLMo's score
    spike_excess: float = number(0.1)  # of the median: an all but constant loss has a sigma of nothing
    spike_over_worst: float = number(2.0)  # times the distance of the worst recent value: few rows have long tails
    spike_proportion: float = number(3.0)  # times the distance to the limit: beyond it one odd batch is a warning
    spike_new_level: float = window(16.0, least=1)  # updates beyond the limit in a row: the loss has moved there
    plateau_updates: float = patience(500.0, least=50)  # two halves of this many updates are compared
    plateau_gain: float = share(0.002, "")  # of the loss: less than this between the halves is a plateau
    too_good_share: float = share(0.1, "0 for never")  # of the held-out loss; to learn a small text by heart takes long
    unshifted_share: float = share(0.9)  # of places asked for their own token; in prose one in thirty repeats the last
    repeated_rows_share: float = share(0.25)  # of held-out rows, beyond those that repeat as training rows do
    # Gradients and updates.
    no_gradient_updates: float = patience(20.0)  # an expert or a rare branch may miss a few; 20 in a row are no chance
    zero_gradient_updates: float = patience(20.0)  # a gradient that is there and 0; rare branches again
    update_ratio: float = ceiling(0.3)  # update / weight, usually 0.001; small models start near 0.1; 0.3 forgets all
    update_ratio_grace: float = patience(20.0)  # updates: Adam's first ones are as long as lr allows
    clip_always_updates: float = patience(100.0)  # a clip is meant for outliers; 100 in a row are the rule
    weight_tolerance: float = share(0.01, "", 0.001)  # 16-bit losses round by 0.004, and any real mistake is larger
    slope_tolerance: float = share(0.15, "", 0.05)  # of the loss along its gradient; three times what a kink may do
    # Router.
    tie_share: float = share(0.02)  # exact ties; a float32 router has none
    tie_spacing: float = ceiling(0.25)  # nats; closer experts are equals: c_z lets 2 to 18 % tie in bf16, at no loss
    router_patience: float = patience(100.0, least=0)  # many routers start on one expert and spread within some tens
    dead_router_updates: float = patience(20.0)  # a router's gradient is never exactly 0 while anything reaches it
    collapse_share: float = share(0.9)  # of all tokens choose one expert
    dropped_share: float = share(0.3)  # at capacity_factor 1 and random routing about 15 % are dropped
    # Loss scale.
    scaler_grace_updates: float = patience(20.0)  # the scale starts too high on purpose and is halved until it fits
    underflow_share: float = share(0.2)  # of gradient values; healthy toy models lose 0.2 %, and 11 % without a scale
    underflow_looks: float = patience(3.0, "looks")  # in a row; a single batch may have little to teach
    # Memory.
    unexplained_memory_share: float = ceiling(0.2)  # of what was predicted
    own: Mapping[str, float] = field(default_factory=dict, hash=False)  # limits of a workload's own probes, by name

    @classmethod
    def of(cls, limits: Mapping[str, float]) -> Thresholds:
        """The defaults with `limits` in their place; those that are none of ours are found under `own`."""
        ours = {name: float(limit) for name, limit in limits.items() if name in THRESHOLDS}
        return cls(**ours, own={name: float(limit) for name, limit in limits.items() if name not in THRESHOLDS})


CHECKS: Mapping[str, str] = {
    "nonfinite_update": "a loss, gradient or parameter is no longer finite",
    "loss_spike": "the loss jumps far above its recent course",
    "loss_plateau": "the loss has stopped falling",
    "loss_too_good": "the training loss lies far below the held-out one",
    "loss_factor": "the gradient is not that of the loss but a multiple of it",
    "accumulation_weights": "micro-batches do not count by their valid targets",
    "gradients_not_cleared": "gradients of the update before are still there",
    "clip_order": "what was applied is not the clipped, unscaled gradient",
    "clip_always": "the clip acts on every update",
    "schedule_pace": "the learning-rate schedule does not advance once for each applied update",
    "no_gradient": "a parameter that should be trained never receives a gradient",
    "not_optimized": "the optimiser does not have all parameters of the model that are to be trained",
    "zero_gradient": "the gradient of a whole block is exactly zero",
    "update_too_large": "an update is as large as the weights themselves",
    "targets_not_shifted": "the targets are the tokens the model reads, not those that follow",
    "future_leaks": "a prediction depends on tokens that come after it",
    "padding_counts": "padding changes the loss or the gradient",
    "batch_coupling": "batch norm, dropout or capacity makes the split into micro-batches matter",
    "evaluation_data": "held-out rows are among the training rows",
    "evaluation_mode": "evaluation is not in eval mode, or not deterministic",
    "dead_router": "the router's choice has no gradient from the task",
    "router_dtype": "the router's logits or softmax are not computed in the dtype that was asked for",
    "router_ties": "rounding makes the router's choice a matter of chance",
    "router_collapsed": "one expert gets nearly all tokens",
    "dead_experts": "experts that no token chooses",
    "tokens_dropped": "a large share of assignments finds its expert full",
    "load_count": "assignments are counted more or less than once",
    "auxiliary_loss": "balance loss or z-loss is not what its definition says",
    "z_loss": "the z-loss does not reach the router, or not in proportion to c_z",
    "balance_loss": "the balance loss does not reach the router",
    "scaler_skips": "the loss scaler skips updates in a row",
    "gradient_underflow": "a large share of the gradient is lost to underflow",
    "memory_unexplained": "the backward pass keeps more, or less, than predicted",
    "probe_failed": "a probe itself failed; training went on without it",
    "check_failed": "a check itself failed",
}
"""Every finding of a training workload, by name."""

EARLY_CHECKS = (
    *("not_optimized", "future_leaks", "padding_counts", "batch_coupling", "evaluation_data", "evaluation_mode"),
    *("z_loss", "balance_loss", "check_failed"),
)
"""Those that are found before a sweep trains or not at all; the first also by `watch`."""

DEFAULTS = Thresholds()
THRESHOLDS: Mapping[str, Limit] = {
    one.name: Limit.of(getattr(DEFAULTS, one.name), one.metadata["sense"])
    for one in fields(Thresholds)
    if "sense" in one.metadata
}
"""Their defaults, each of which knows what may stand in its place."""
