"""Reverse-mode differentiation of single numbers, checked against torch or micrograd; `accumulate` breaks it silently.

`product` is relu(a b + c) a, in which `a` is used twice. `mlp` is a small ReLU network with the squared error of a few
examples, summed; its weights (uniform within 1, biases 0) and inputs depend on the seed, its targets are 1, -1, 1, ...
A field of the other expression is refused. There is one report, at step 1. Nothing is trained.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from orchestrator.workload import WorkloadConfig

IMPLEMENTATION = "workloads.scalar_autograd.check:ScalarAutograd"

METRICS = (
    "num_nodes",  # distinct numbers in the graph: leaves, constants and results
    "num_parameters",  # numbers whose gradients are compared
    "output",
    "gradient/a",  # of `product` only, as the next two
    "gradient/b",
    "gradient/c",
    "grad/max_abs",  # largest absolute gradient of the reference; 0 means that the comparison shows nothing
    "max_abs_diff",  # largest difference between a gradient and the reference's
    "relative_diff",  # max_abs_diff over grad/max_abs; NaN where that is 0
)

USED_BY_BOTH = ("accumulate", "reference")
USED_BY = {"product": ("a", "b", "c"), "mlp": ("num_inputs", "layers", "num_examples")}


class Config(WorkloadConfig):
    expression: Literal["product", "mlp"] = Field("product", description="what is differentiated")
    accumulate: Literal["add", "assign"] = Field(
        "add", description="a number used twice adds up its gradients; assign keeps the last one, as = for += does"
    )
    reference: Literal["torch32", "torch64", "micrograd"] = Field("torch32", description="the engine to compare with")
    a: float = Field(2.0, description="product only")
    b: float = Field(-3.0, description="product only")
    c: float = Field(10.0, description="product only")
    num_inputs: int = Field(3, ge=1, description="mlp only")
    layers: list[Annotated[int, Field(ge=1)]] = Field([4, 4, 1], min_length=1, description="mlp only: widths")
    num_examples: int = Field(4, ge=1, description="mlp only")
    seed: int = Field(0, ge=0, description="mlp only: of weights and inputs")

    @model_validator(mode="after")
    def _check(self) -> Config:
        self.refuse_idle((*USED_BY_BOTH, *USED_BY[self.expression]), "expression")
        return self
