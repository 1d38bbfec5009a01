"""What probes and checks can find, and the limits they hold it against. Imports no torch, finds nothing.

A sweep changes a limit with `health: {thresholds: {spike_sigmas: 8}}` and ends runs on findings with
`stop: {on: [loss_spike]}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Thresholds:
    """The named limits, each with the reason for its default."""

    # Loss. A robust sigma is 1.4826 times the median absolute deviation, which a spike itself cannot inflate.
    spike_sigmas: float = 6.0  # OLMo's spike score uses 6 standard deviations too
    spike_window: float = 128.0  # updates that the median is taken over; 128 in OLMo's score
    spike_excess: float = 0.1  # of the median: an all but constant loss has a sigma of nothing
    spike_over_worst: float = 2.0  # times the distance of the worst recent value: losses of few rows have long tails
    plateau_updates: float = 500.0  # two halves of this many updates are compared
    plateau_gain: float = 0.002  # of the loss: less than this between the halves is a plateau
    too_good_share: float = 0.1  # of the held-out loss: memorising a small text takes long to get there
    # Gradients and updates.
    no_gradient_updates: float = 20.0  # an expert or a rare branch may miss a few updates; 20 in a row are no chance
    update_ratio: float = 0.3  # update / weight, usually 0.001; small models start near 0.1; 0.3 soon forgets all
    weight_tolerance: float = 0.01  # relative; 16-bit losses round by less, and any real mistake is larger
    # Router.
    tie_share: float = 0.02  # exact ties; a float32 router has none
    tie_spacing: float = 0.25  # nats; closer experts are equals anyhow: c_z lets 2 to 18 % tie in bf16, at no loss
    router_patience: float = 100.0  # updates; many routers start on one expert and spread within some tens of them
    collapse_share: float = 0.9  # of all tokens choose one expert
    dropped_share: float = 0.3  # at capacity_factor 1 and random routing about 15 % are dropped
    # Loss scale.
    scaler_grace_updates: float = 20.0  # the scale starts too high on purpose and is halved until it fits
    underflow_share: float = 0.2  # of gradient values; healthy toy models lose 0.2 %, and 11 % without a scale
    # Memory.
    unexplained_memory_share: float = 0.2  # of what was predicted

    @classmethod
    def of(cls, changed: Mapping[str, float]) -> Thresholds:
        """The defaults with a sweep's changes; limits of the workload's own, which may be among them, are its own."""
        return cls(**{name: limit for name, limit in changed.items() if name in THRESHOLDS})


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

THRESHOLDS: Mapping[str, float] = asdict(Thresholds())
