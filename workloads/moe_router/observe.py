"""The held-out error of `moe_router`. Changes nothing it looks at."""

from __future__ import annotations

from workloads.engine.update import Scalar
from workloads.layers.router_metrics import logit_metrics, to_floats
from workloads.moe_router.model import MoeRegression
from workloads.moe_router.task import Batch


def evaluate(model: MoeRegression, held_out: Batch, offset: Scalar) -> dict[str, float]:
    """Error and logits on rows that no training batch holds; `model` is in eval mode, so no token is dropped."""
    prediction_NO, routing = model(held_out.inputs_NI, offset)
    mse = (prediction_NO.double() - held_out.targets_NO.double()).square().mean()
    return to_floats({"val/mse": mse, **{f"val/{name}": value for name, value in logit_metrics(routing).items()}})
