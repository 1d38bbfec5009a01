"""The GPT of `char_gpt` with a mixture of experts in every block: z-loss, top-k, router precision, capacity, bugs.

The loss is cross-entropy + alpha * balance + c_z * z-loss, the latter two summed over the layers, each a mean over the
valid tokens of the whole accumulation window: how it is split into micro-batches changes nothing but rounding. For the
balance loss that takes a second forward pass where a window has several micro-batches and alpha is not 0.
Step s is the state after s updates. All losses are in nats.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from orchestrator.workload import fusible, size
from workloads.char_gpt.config import METRICS as CHAR_METRICS
from workloads.char_gpt.config import Bug as CharBug
from workloads.char_gpt.config import Config as CharConfig
from workloads.layers.moe_config import MoeConfig
from workloads.probes import catalogue

IMPLEMENTATION = "workloads.moe_gpt.train:MoeGpt"

CHECKS, EARLY_CHECKS, THRESHOLDS = catalogue.CHECKS, catalogue.EARLY_CHECKS, catalogue.THRESHOLDS

METRICS = (
    *CHAR_METRICS,
    "router/z",  # mean squared log-sum-exp of the raw logits, over the tokens of all layers
    "router/mean_logit",
    "router/max_logit",  # mean over tokens of the winning logit
    "router/abs_max_logit",  # largest absolute logit
    "router/logit_spacing",  # there, from one number of the logits' dtype to the next
    "router/entropy",  # mean over tokens, of an even choice's: 1 is undecided, 0 is certain
    "router/load/*",  # per expert, its share of the assignments asked for in all layers; sums to 1
    "router/load_max_over_mean",  # of the least even layer
    "router/dead_experts",  # without a token in this update, in the worst layer
    "router/dropped_share",  # assignments that found their expert full
    "router/tie_share",  # tokens whose choice was an exact tie
    "router/assignments",  # (token, expert, layer) triples carried out in this update
    "router/*/layer*",  # all but load and assignments also by layer
    "val/router/z",
    "val/router/mean_logit",
    "val/router/max_logit",
    "val/router/abs_max_logit",
    "val/router/logit_spacing",
    "grad/preclip/router*",  # norms by layer, as grad/preclip/total
    "grad/preclip/experts*",
)

Bug = Literal[CharBug, "bf16_router", "renormalized_top1", "double_counted_load", "padding_in_z"]


class Config(MoeConfig, CharConfig):
    capacity_factor: float | None = Field(
        None, gt=0, description="places an expert has in a micro-batch, in even shares; null is no limit; training only"
    )
    expert_hidden: int | None = Field(None, ge=1, description="hidden width of an expert; null is 4 * width")
    num_held_out_windows: int = size(128, ge=1, description="held-out rows of an evaluation")
    c_z: float = fusible(0.0, ge=0, description="coefficient of the router z-loss of each layer")
    bug: Bug = Field("none", description="a planted silent bug")  # type: ignore[assignment]  # four more than there

    def bug_needs(self) -> dict[str, tuple[bool, str]]:
        chooses = self.num_experts > 1
        return {
            **super().bug_needs(),
            "bf16_router": (
                chooses and self.precision in ("fp32", "fp16", "bf16-selective"),
                "num_experts above 1 and a precision with a float32 router: fp32, fp16 or bf16-selective",
            ),
            "renormalized_top1": (
                chooses and self.k == 1 and not self.renormalize,
                "num_experts above 1, k: 1 and renormalize: auto",
            ),
            "double_counted_load": (chooses and self.alpha > 0, "num_experts above 1 and alpha above 0"),
            "padding_in_z": (
                chooses and self.padding > 0 and self.c_z > 0,
                "num_experts above 1, padding and c_z above 0",
            ),
        }
