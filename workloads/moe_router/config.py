"""A mixture-of-experts regression whose router can be stressed: z-loss, top-k, precision, a common logit offset.

Eight Gaussian clusters in 16 dimensions, each with its own linear map, are learned by Linear -> MoE -> Linear and Adam.
Step s is the state after s updates (an update that was skipped because its gradient was not finite counts as one).
Nothing is reported before the first update; `val/*` is measured at every report, on rows no batch is drawn from.
Accumulation draws `batch_size * accumulation_steps` rows an update, so (128, 2) sees the same rows as (256, 1).
`router_offset`, its drift and its learnable correction are an imposed stress, not an instability that arises by itself.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from orchestrator.workload import FieldConflict, WorkloadConfig, fusible

IMPLEMENTATION = "workloads.moe_router.train:MoeRouter"

METRICS = (
    # The optimised loss of this update's rows: task + alpha * balance + c_z * z. NaN also when the update could not
    # be used: a parameter is no longer finite, or the gradient was not (fp16 excepted: it lowers its loss scale).
    "train/loss",
    "train/mse",  # the task's part alone, as it is
    "val/mse",
    "val/router/z",
    "val/router/max_logit",
    "val/router/abs_max_logit",
    "router/z",  # mean squared log-sum-exp of the raw logits
    "router/max_logit",  # mean over tokens of the winning logit
    "router/abs_max_logit",  # largest absolute logit
    "router/load/*",  # per expert, its share of the assignments asked for; sums to 1
    "router/load_max_over_mean",
    "router/dropped_share",  # assignments that found their expert full
    "router/tie_share",  # tokens whose choice was an exact tie
    "router/assignments",  # (token, expert) pairs carried out in this update
    "grad/preclip/router",  # norms: unscaled, before the clip, in float64
    "grad/preclip/experts",
    "grad/preclip/embed",
    "grad/preclip/readout",
    "grad/preclip/total",
    "grad/clipped_share",  # of the updates since the last report
    "update/skipped_steps",  # so far; the gradient was not finite
    "params/nonfinite",  # parameter values that are NaN or infinite
    "scaler/scale",  # fp16 only, as the next
    "scaler/skipped_steps",
    "time/step_seconds",  # mean of the updates since the last report, evaluation not counted
)

DEAD_ROUTER = (
    "renormalize=true with k=1 makes every weight the constant 1, so the router's gradient of the task is exactly 0; "
    "write renormalize: auto, exclude this point, or set allow_dead_router: true to demonstrate it"
)


class Config(WorkloadConfig):
    c_z: float = fusible(0.0, ge=0, description="coefficient of the router z-loss, mean of squared log-sum-exp")
    alpha: float = fusible(0.01, ge=0, description="coefficient of the load-balance loss; load shares sum to 1")
    num_experts: int = Field(8, ge=1, description="experts in the layer")
    k: int = Field(2, ge=1, description="experts per token")
    renormalize: Literal["auto"] | bool = Field(
        "auto", validate_default=True, description="chosen weights sum to 1; auto is true for k >= 2, false for k = 1"
    )
    allow_dead_router: bool = Field(False, description="accept renormalize: true with k: 1")
    capacity_factor: float | None = Field(
        None, gt=0, description="places an expert has, in even shares; null is no limit; training only"
    )
    precision: Literal["fp32", "bf16", "fp16", "bf16-selective", "bf16-softmax"] = Field(
        "fp32", description="what rounds to 16 bits: bf16 everything, bf16-softmax all but the router's softmax, "
        "bf16-selective and fp16 all but the router"
    )  # fmt: skip
    lr: float = fusible(3e-3, gt=0, description="Adam's learning rate")
    steps: int = Field(800, ge=1, description="updates")
    batch_size: int = Field(256, ge=1, description="rows of a micro-batch, drawn with replacement")
    accumulation_steps: int = Field(1, ge=1, description="micro-batches of an update")
    clip_norm: float | None = Field(None, gt=0, description="largest gradient norm; null is no clip")
    seed: int = fusible(0, ge=0, description="of the rows, their order and the initial weights")
    task_seed: int = fusible(0, ge=0, description="which task: centres and linear maps; the same for every seed")
    task_scale: float = fusible(2.0, gt=0, description="standard deviation of the clean targets")
    spread: float = fusible(0.6, ge=0, description="standard deviation within a cluster")
    noise: float = fusible(0.42, ge=0, description="standard deviation of the label noise, in training and test")
    router_offset: float = fusible(0.0, description="added to every logit: an imposed stress")
    offset_drift: float = fusible(0.0, description="added to the offset at every step")
    offset_learnable: bool = Field(False, description="learn a correction to the offset, which starts at 0")
    offset_lr: float = fusible(1.0, ge=0, description="Adam's learning rate for that correction")
    d_model: int = Field(32, ge=1, description="width of the model")
    d_hidden: int = Field(64, ge=1, description="hidden width of an expert")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto is the device the trial was given")

    @field_validator("renormalize", mode="after")
    @classmethod
    def _resolve_renormalize(cls, value: Literal["auto"] | bool, info: ValidationInfo) -> bool:
        """Replaces `auto` by what it means, so that the value that was used is the value that is logged."""
        return bool(info.data.get("k", 2) >= 2) if value == "auto" else value

    @model_validator(mode="after")
    def _check_router(self) -> Config:
        if self.k > self.num_experts:
            raise FieldConflict("k", f"k={self.k} experts per token, but num_experts={self.num_experts}")
        if self.k == 1 and self.renormalize is True and not self.allow_dead_router:
            raise FieldConflict("renormalize", DEAD_ROUTER)
        return self
