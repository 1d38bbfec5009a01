"""Bytes of a GPT's weights and of what it keeps for the backward pass, by block, without needing the memory.

Nothing is trained or allocated: the model's own code runs once, forward, on tensors that have a shape and no values.
Counted is what autograd holds between the forward and the backward pass of one micro-batch with the CPU's kernels: each
storage once, parameters apart; a copy of a weight in another dtype is such a storage. Not counted: gradients, optimiser
state, and what lives inside an operation only. With `checkpointing` the backward pass also needs, one block at a time,
what that block keeps without it. There is one report, at step 1; nothing depends on chance, so there is no seed.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field, ValidationInfo, field_validator, model_validator

from orchestrator.workload import FieldConflict, WorkloadConfig

IMPLEMENTATION = "workloads.memory.measure:Memory"

METRICS = (
    "memory/num_parameters",
    "memory/weight_bytes",  # float32 masters, as under every precision
    "memory/weight_bytes/*",  # per block: embed, positions, block0 .., readout; a tied readout is the embedding
    "memory/weight_megabytes",  # decimal, as the next
    "memory/saved_megabytes",
    "memory/saved_bytes",  # kept for the backward pass
    "memory/saved_bytes/*",  # per section: embed, block0 .., readout, loss; a block's input counts to the block
    "memory/log_probabilities_share",  # of the saved bytes: rows x context x vocabulary, from which the loss is taken
)


class Size(NamedTuple):
    depth: int
    heads: int
    width: int


# Source: GPT-2 (Radford et al., 2019), table 2, and the heads of the released weights.
PRESETS = {
    "gpt2-small": Size(depth=12, heads=12, width=768),
    "gpt2-medium": Size(depth=24, heads=16, width=1024),
    "gpt2-large": Size(depth=36, heads=20, width=1280),
    "gpt2-xl": Size(depth=48, heads=25, width=1600),
}


class Config(WorkloadConfig):
    preset: Literal["gpt2-small", "gpt2-medium", "gpt2-large", "gpt2-xl"] = Field(
        "gpt2-small", description="gives depth, heads and width where they are not set"
    )
    depth: int | None = Field(None, ge=1, validate_default=True, description="blocks; null is the preset's")
    heads: int | None = Field(None, ge=1, validate_default=True, description="of each block; null is the preset's")
    width: int | None = Field(None, ge=1, validate_default=True, description="of the model; null is the preset's")
    vocabulary: int = Field(50257, ge=2, description="tokens that can be told apart")
    context: int = Field(1024, ge=1, description="tokens of a row, and the model's longest row")
    batch_size: int = Field(1, ge=1, description="rows of a micro-batch")
    tied: bool = Field(True, description="the readout is the token embedding")
    attention: Literal["sdpa", "math"] = Field(
        "sdpa", description="sdpa never holds the attention matrix; math writes it out"
    )
    checkpointing: bool = Field(False, description="keep each block's input only and recompute the rest when needed")
    dropout: float = Field(0.0, ge=0, lt=1, description="share of dropped values, on the embedding and on both parts")
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="in which the model computes")

    @field_validator("depth", "heads", "width", mode="after")
    @classmethod
    def _take_from_preset(cls, value: int | None, info: ValidationInfo) -> int | None:
        """Replaces null by what it means, so that the value that was used is the value that is logged."""
        size = PRESETS.get(info.data.get("preset", ""))  # absent when the preset itself was refused
        return getattr(size, str(info.field_name), None) if value is None else value

    @model_validator(mode="after")
    def _check_heads(self) -> Config:
        if self.width and self.heads and self.width % self.heads:
            raise FieldConflict("heads", f"heads={self.heads} does not divide width={self.width}")
        return self
