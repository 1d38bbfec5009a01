"""What depth does to the gradients of a stack of tanh layers, plain or residual: measured at the start, or trained.

`task: gradients` draws a stack and one batch from N(0, 1) and reports, at step 1, the gradient norm of every layer with
respect to its input and, apart, to its weights. The inputs' vanish or explode with depth; the weights' need not, since
the signal that multiplies them shrinks or grows the other way. Nothing is trained.
`task: train` puts a linear map in front and behind and learns y = sin(2 a.x) of 8 inputs, standardised, without noise:
val/mse is 1 for who knows nothing, 0.85 for the best linear map. Step s is the state after s updates.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from orchestrator.workload import FieldConflict, fusible
from workloads.engine.training_config import TRAINING_METRICS, TrainingConfig
from workloads.probes import catalogue

IMPLEMENTATION = "workloads.residual_stack.train:ResidualStack"

CHECKS = (*catalogue.CHECKS, "gradient_overflow")
EARLY_CHECKS, THRESHOLDS = catalogue.EARLY_CHECKS, catalogue.THRESHOLDS

METRICS = (
    # task: gradients. Norms are taken in float64, whatever the dtype of the gradients.
    "grad/input_ratio",  # first layer's over last layer's; below 1 the gradient vanishes on its way to the input
    "grad/weight_ratio",
    "grad/input/*",  # layer0 .., with respect to the layer's input, the batch as one tensor
    "grad/weight/*",
    "grad/underflow_share",  # of the inputs' gradients: below the dtype's smallest normal number
    # task: train
    *TRAINING_METRICS,
    "val/mse",  # on 1024 rows that no batch is drawn from
    "grad/preclip/*",  # embed, layer0 .., readout: the weights' gradients
)

USED_BY_BOTH = {"task", "depth", "width", "scale", "residual", "batch_size", "seed", "device"}
GRADIENTS_ONLY = {"loss", "dtype"}


class Config(TrainingConfig):
    task: Literal["gradients", "train"] = Field("gradients", description="measure once at the start, or train")
    depth: int = Field(60, ge=1, description="tanh layers")
    width: int = Field(256, ge=1, description="of each layer")
    scale: float = fusible(0.5, gt=0, description="standard deviation of the initial weights, times sqrt(width)")
    residual: bool = Field(False, description="add each layer's input to its output")
    loss: Literal["mean_square", "sum", "target"] = Field(
        "mean_square", description="of the output, or mean squared distance to a target from N(0, 1); gradients only"
    )
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = Field(
        "float64", description="of everything but the norms; gradients only"
    )
    batch_size: int = Field(32, ge=1, description="rows of a micro-batch")
    steps: int = Field(400, ge=1, description="updates; train only, as the rest of the training")
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="in which the model computes; train only")

    @model_validator(mode="after")
    def _refuse_idle_fields(self) -> Config:
        """An axis without effect would look like a finding."""
        fields = type(self).model_fields
        idle = GRADIENTS_ONLY if self.task == "train" else fields.keys() - USED_BY_BOTH - GRADIENTS_ONLY
        for name in sorted(idle):
            if getattr(self, name) != fields[name].default:
                raise FieldConflict(
                    name, f"{name} does nothing with task: {self.task}; leave it out or change the task"
                )
        return self
