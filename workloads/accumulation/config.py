"""One accumulated update against one combined update, on a small network; wrong ways to accumulate are parameters.

A network 12-32-5 is trained twice from the same weights, by SGD with learning rate 1: once in micro-batches, as asked,
and once on each window as a single batch, in the right way. `num_examples` are cut into windows of `window_sizes`; the
last window holds what is left. The rate falls linearly over the windows. Step s is the state after window s.
The combined run has the same precision; the one that fp16 is compared with has fp32.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from orchestrator.workload import FieldConflict, WorkloadConfig

IMPLEMENTATION = "workloads.accumulation.compare:Accumulation"
NUM_CLASSES = 5

METRICS = (
    # "Change" is that of all weights since the start; with one window and learning rate 1 it is minus the gradient.
    # What compares two changes is not reported before the combined run's first update.
    "max_abs_diff",  # largest difference of a weight from the combined run's
    "relative_diff",  # norm of the difference of the two changes, over the norm of the combined run's change
    "change_ratio",  # norm of the change, over that of the combined run
    "cosine",  # between the two changes
    "grad/preclip/total",  # of this window, unscaled, before the last clip
    "combined/grad/preclip/total",
    "num_updates",  # applied so far
    "num_scheduler_steps",
    "pending_gradient",  # norm of a gradient that was accumulated and never applied
    "update/skipped_steps",
    "scaler/scale",  # fp16 only
    "weight/*",  # the first three weights
    "norm/running_var_diff",  # batchnorm only: largest difference of a running variance from the combined run's
    "norm/num_batches_tracked",
)


class Config(WorkloadConfig):
    window_sizes: list[Annotated[int, Field(ge=1)]] = Field(
        [8, 8, 8, 2], min_length=1, description="examples in each micro-batch of a window"
    )
    num_examples: int | None = Field(None, ge=1, description="null is one full window")
    last_window: Literal["flush", "drop"] = Field(
        "flush", description="a window of too few micro-batches is applied, or left without an update"
    )
    weighting: Literal["tokens", "weight_sum", "rows", "mean_of_means", "none", "fixed"] = Field(
        "tokens",
        description="a micro-batch counts by its valid targets, by their class weights, by all its rows (masked or "
        "not), as one of the window's, as 1, or as one of a full window's",
    )
    mask_rate: float = Field(0.0, ge=0, lt=1, description="share of masked targets; a window's first is never masked")
    class_weights: list[Annotated[float, Field(gt=0)]] | None = Field(
        None,
        min_length=NUM_CLASSES,
        max_length=NUM_CLASSES,
        description="of the loss; right with weighting: weight_sum only",
    )
    clip_norm: float | None = Field(None, gt=0, description="largest gradient norm; null is no clip")
    clip_at: Literal["combined", "micro", "buffer", "before_unscale"] = Field(
        "combined",
        description="what is clipped: the window's gradient, each micro-batch's, their running sum, or the window's "
        "before the loss scale is taken out",
    )
    norm_layer: Literal["none", "batchnorm", "frozen_batchnorm"] = Field(
        "none", description="frozen uses its running statistics, as in evaluation"
    )
    precision: Literal["fp32", "fp64", "fp16"] = Field("fp32", description="of the network; fp16 has a loss scale")
    overflow_at: int | None = Field(None, ge=1, description="the window with an infinite input, from 1; null is none")
    scheduler_on: Literal["real", "always", "micro"] = Field(
        "real", description="the rate falls at applied updates, at skipped ones too, or at every micro-batch"
    )
    seed: int = Field(0, ge=0, description="of examples, masks and weights")

    @property
    def windows(self) -> list[list[int]]:
        """The sizes of the micro-batches, window by window."""
        left = sum(self.window_sizes) if self.num_examples is None else self.num_examples
        windows: list[list[int]] = []
        while left:
            windows.append([])
            for size in self.window_sizes:
                taken = min(size, left)
                windows[-1] += [taken] if taken else []
                left -= taken
        return windows

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.norm_layer == "batchnorm" and min(map(min, self.windows)) == 1:
            raise FieldConflict("norm_layer", "batchnorm has no variance of a micro-batch of 1; take larger ones")
        if self.overflow_at is not None and not self.overflow_at <= len(self.windows) >= 2:
            count = f"num_examples makes {len(self.windows)}"
            raise FieldConflict("overflow_at", f"overflow_at={self.overflow_at} skips one window of several; {count}")
        return self

    @model_validator(mode="after")
    def _refuse_idle_deviations(self) -> Config:
        """A wrong way that changes nothing would pass for a harmless one."""
        if self.clip_at != "combined" and self.clip_norm is None:
            raise FieldConflict("clip_at", f"clip_at={self.clip_at} without a clip; set clip_norm")
        if self.clip_at == "before_unscale" and self.precision != "fp16":
            raise FieldConflict("clip_at", "clip_at=before_unscale without a loss scale; set precision: fp16")
        if self.scheduler_on == "always" and self.overflow_at is None:
            raise FieldConflict("scheduler_on", "scheduler_on=always without a skipped update; set overflow_at")
        if self.last_window == "drop" and len(self.windows[-1]) == len(self.window_sizes):
            raise FieldConflict(
                "last_window", "last_window=drop without a window of too few micro-batches; set num_examples"
            )
        return self
