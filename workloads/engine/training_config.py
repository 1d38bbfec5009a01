"""The fields every training workload shares, and the metrics the loop itself reports. Imports no torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from orchestrator.workload import FieldConflict, WorkloadConfig, fusible, size

TRAINING_METRICS = (
    # The optimised loss of this update's rows, weighted by valid targets. NaN also when the update could not be used:
    # a parameter is no longer finite, or the gradient was not (fp16 excepted: it lowers its loss scale).
    "train/loss",
    "train/lr",  # the learning rate this update used
    "grad/preclip/total",  # norms: unscaled, before the clip, in float64; a missing gradient counts as 0
    "update/ratio/total",  # length of the update over that of the weights, matrices only
    "update/ratio/*",  # by block
    "grad/clipped_share",  # of the updates since the last report
    "update/skipped_steps",  # so far; the gradient was not finite
    "params/nonfinite",  # parameter values that are NaN or infinite
    "scaler/scale",  # fp16 only, as the next three
    "scaler/skipped_steps",
    "grad/underflow_share",  # of values, scaled, too small for all digits; rows and columns of 0 left out
    "grad/overflow_share",  # of all values, not finite
    "memory/saved_bytes",  # kept for the backward pass of the largest micro-batch of the first update, said once
    "memory/saved_bytes/*",  # by block
    "memory/predicted_bytes",  # by a closed form, where there is one
    "memory/unexplained_bytes",
    "memory/peak_bytes",  # of a GPU
    "time/step_seconds",  # mean of the updates since the last report, evaluation not counted
    "time/tokens_per_second",  # valid targets (rows or tokens) trained on, over the same updates
)


class TrainingConfig(WorkloadConfig):
    steps: int = size(800, ge=1, description="updates")
    batch_size: int = size(256, ge=1, description="rows of a micro-batch")
    accumulation_steps: int = Field(1, ge=1, description="micro-batches of an update")
    order: Literal["replacement", "epochs"] = size(
        "replacement",
        description="rows are drawn anew for each update, or every row once an epoch; an epoch's last micro-batch and "
        "last window may be smaller",
    )
    precision: Literal["fp32", "bf16", "fp16", "bf16-selective", "bf16-softmax"] = Field(
        "fp32", description="what rounds to 16 bits: bf16 everything, bf16-softmax all but the router's softmax, "
        "bf16-selective and fp16 all but the router"
    )  # fmt: skip
    lr: float = fusible(3e-3, gt=0, description="largest learning rate")
    optimizer: Literal["adam", "adamw", "sgd"] = Field("adam", description="which update rule")
    beta1: float = fusible(0.9, ge=0, lt=1, description="decay of the first moment; the momentum of sgd is `momentum`")
    beta2: float = fusible(0.999, ge=0, lt=1, description="decay of the second moment")
    momentum: float = fusible(0.0, ge=0, lt=1, description="of sgd")
    weight_decay: float = fusible(0.0, ge=0, description="on matrices, not on biases and norms; decoupled in adamw")
    schedule: Literal["constant", "cosine", "linear"] = Field(
        "constant", description="course of the learning rate after the warm-up; it counts applied updates only"
    )
    warmup_steps: int = size(0, ge=0, description="updates over which the learning rate rises linearly")
    min_lr_share: float = fusible(0.0, ge=0, le=1, description="of lr, where cosine and linear end")
    clip_norm: float | None = Field(None, gt=0, description="largest gradient norm; null is no clip")
    eval_every: int | None = size(
        None, ge=1, description="steps between evaluations, at a report; null is at every report; the last step always"
    )
    compile: bool = Field(False, description="torch.compile the model; worth it for long runs only")
    seed: int = fusible(0, ge=0, description="of the data, their order and the initial weights")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto is the device the trial was given")

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        if self.warmup_steps > self.steps:
            raise FieldConflict(
                "warmup_steps", f"warmup_steps={self.warmup_steps}, but steps={self.steps}: lr is not met"
            )
        return self
