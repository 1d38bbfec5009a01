"""A mixture-of-experts regression whose router can be stressed: z-loss, top-k, precision, a common logit offset.

Eight Gaussian clusters in 16 dimensions, each with its own linear map, are learned by Linear -> MoE -> Linear and Adam.
Step s is the state after s updates (an update that was skipped because its gradient was not finite counts as one).
`val/*` is measured at every report, on rows no batch is drawn from.
Accumulation draws `batch_size * accumulation_steps` rows an update, so (128, 2) sees the same rows as (256, 1).
`router_offset`, its drift and its learnable correction are an imposed stress, not an instability that arises by itself.
"""

from __future__ import annotations

from pydantic import Field

from orchestrator.workload import fusible
from workloads.engine.training_config import TRAINING_METRICS, TrainingConfig
from workloads.layers.moe_config import MoeConfig
from workloads.probes import catalogue

IMPLEMENTATION = "workloads.moe_router.train:MoeRouter"

CHECKS, EARLY_CHECKS, THRESHOLDS = catalogue.CHECKS, catalogue.EARLY_CHECKS, catalogue.THRESHOLDS

METRICS = (
    *TRAINING_METRICS,
    "train/mse",  # the task's part alone, as it is
    "val/mse",
    "val/router/z",
    "val/router/mean_logit",
    "val/router/max_logit",
    "val/router/abs_max_logit",
    "val/router/logit_spacing",
    "router/z",  # mean squared log-sum-exp of the raw logits
    "router/mean_logit",
    "router/max_logit",  # mean over tokens of the winning logit
    "router/abs_max_logit",  # largest absolute logit
    "router/logit_spacing",  # there, from one number of the logits' dtype to the next
    "router/entropy",  # mean over tokens, of an even choice's: 1 is undecided, 0 is certain
    "router/load/*",  # per expert, its share of the assignments asked for; sums to 1
    "router/load_max_over_mean",
    "router/dead_experts",  # without a token in this update
    "router/dropped_share",  # assignments that found their expert full
    "router/tie_share",  # tokens whose choice was an exact tie
    "router/assignments",  # (token, expert) pairs carried out in this update
    "grad/preclip/router",  # norms by block, as grad/preclip/total
    "grad/preclip/experts",
    "grad/preclip/embed",
    "grad/preclip/readout",
)


class Config(MoeConfig, TrainingConfig):
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
