"""What number formats do to given logits, to routing decisions and to the gradients of a real model.

`measure` says which, and which fields count; any other that is set is refused:
  logits     dtype, logits, mode, magnitude: each logit rounded, and the gate that the first two make
  routing    precision, mode, magnitude, num_tokens, d_model, num_experts: top-1 routing of random tokens, compared with
             float64's
  limits     dtype: where float32 numbers become 0 or infinite in it
  gradients  dtype, loss_scale and the model's fields: the float32 gradient of a character GPT after `train_steps`,
             multiplied by the loss scale and rounded once (a pass that computes in float16 rounds at every layer)
There is one report, at step 1.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from orchestrator.workload import FieldConflict, WorkloadConfig

IMPLEMENTATION = "workloads.rounding.measure:Rounding"

METRICS = (
    # logits
    "rounded/*",  # each logit in its dtype
    "spacing/*",  # from the rounded logit to the next number of its dtype, away from 0
    "max_abs_error",  # of a rounded logit
    "gate",  # probability of the first logit against the second: rounded logits, softmax in float32 or better
    "gate_in_dtype",  # softmax in the dtype too
    "gate_error",  # of `gate`, against float64
    "tie",  # 1 where the first two logits are rounded to the same number
    # routing
    "router/flip_share",  # tokens sent to another expert than float64 sends them to
    "router/tie_share",  # tokens whose largest two logits are exactly equal
    "router/gate_error/mean",  # probability of the chosen expert, against that of float64's choice in float64
    "router/gate_error/max",
    "router/abs_max_logit",
    # limits
    "largest",  # finite number
    "smallest",  # positive number
    "rounds_to_zero_at",  # the largest float32 number that becomes 0
    "overflows_from",  # the smallest float32 number that becomes infinite; infinite if none does
    "epsilon",  # from 1 to the next number
    # gradients
    "grad/underflow_share",  # values that are not 0 and become 0, of all values
    "grad/num_underflow",
    # Of those, biases of attention keys. A softmax does not see them: their true gradient is 0, so nothing is lost.
    "grad/num_underflow_key_bias",
    "grad/num_overflow",  # values that become infinite
    "grad/num_zero",  # values that are 0 before rounding, as of symbols the batch does not hold
    "grad/num_values",
    "grad/abs_max",
    "train/loss",
)

USED_BY = {
    "logits": ("dtype", "logits", "mode", "magnitude"),
    "routing": ("precision", "mode", "magnitude", "num_tokens", "d_model", "num_experts"),
    "limits": ("dtype",),
    "gradients": ("dtype", "loss_scale", "train_steps", "batch_size", "depth", "width", "context"),
}


class Config(WorkloadConfig):
    measure: Literal["logits", "routing", "limits", "gradients"] = Field("logits", description="what is measured")
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = Field("bfloat16", description="of all but routing")
    logits: list[float] = Field(
        [0.3, 0.1, 3.14159, 40.3, 1500.7], min_length=2, description="the first two make a gate"
    )
    mode: Literal["scale", "offset"] = Field(
        "scale", description="what magnitude does: multiply logits, or add to each"
    )
    magnitude: float = Field(1.0, description="of logits and routing; an offset is a stress that no softmax sees")
    precision: Literal["fp32", "bf16", "fp16", "bf16-selective", "bf16-softmax"] = Field(
        "bf16", description="routing: bf16 rounds logits and softmax, bf16-softmax logits; the others keep float32"
    )
    num_tokens: int = Field(20_000, ge=1, description="routing: random tokens, exact in bfloat16 as the weights are")
    d_model: int = Field(32, ge=1, description="routing: width of a token")
    num_experts: int = Field(8, ge=2, description="routing")
    loss_scale: float = Field(1.0, gt=0, description="gradients: factor before rounding")
    train_steps: int = Field(100, ge=0, description="gradients: updates before they are measured; 0 is at the start")
    batch_size: int = Field(16, ge=1, description="gradients: rows of a batch")
    depth: int = Field(4, ge=1, description="gradients: blocks of the model")
    width: int = Field(32, ge=4, multiple_of=4, description="gradients: of the model, which has 4 heads")
    context: int = Field(32, ge=1, description="gradients: characters of a row")
    seed: int = Field(0, ge=0, description="of tokens and weights")

    @model_validator(mode="after")
    def _check(self) -> Config:
        self.refuse_idle(USED_BY[self.measure], "measure")
        if self.mode == "scale" and self.magnitude == 0:
            raise FieldConflict("magnitude", "a scale of 0 makes all logits equal; for none write magnitude: 1")
        return self
