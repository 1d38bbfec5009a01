"""Measures how large a loss's gradient is at every layer of a stack: one forward and one backward. Trains nothing.

Axes: N rows, W width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from orchestrator.trial import Finding, Severity
from orchestrator.workload import Context
from workloads.engine.devices import choose_device
from workloads.engine.random import generator, normal
from workloads.residual_stack.config import Config
from workloads.residual_stack.stack import TanhStack

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean_square": lambda output_NW, _: output_NW.square().mean(),
    "sum": lambda output_NW, _: output_NW.sum(),
    "target": lambda output_NW, target_NW: (output_NW - target_NW).square().mean(),
}


@dataclass(frozen=True)
class LayerGradients:
    """Gradient norms in float64, first layer first. `underflow_share` is that of the inputs' gradients, all layers."""

    input_norms: Sequence[float]
    weight_norms: Sequence[float]
    underflow_share: float


def measure(config: Config, context: Context) -> LayerGradients:
    """Draws weights, input and target in float32, whatever the dtype of the rest: trials differ in nothing else."""
    device, dtype = choose_device(config.device, context), DTYPES[config.dtype]
    stack = TanhStack(config.width, config.depth, config.scale, config.residual, generator(context, "init"))
    rows = normal((2, config.batch_size, config.width), generator(context, "data"))
    input_NW, target_NW = rows.to(device, dtype)
    states_NW = stack.to(device, dtype)(input_NW.requires_grad_())
    loss = LOSSES[config.loss](states_NW[-1], target_NW)
    gradients = torch.autograd.grad(loss, [*states_NW[:-1], *stack.weights])
    of_inputs, of_weights = gradients[: config.depth], gradients[config.depth :]
    return LayerGradients(norms(of_inputs), norms(of_weights), underflow_share(torch.stack(of_inputs)))


def norms(gradients: Sequence[Tensor]) -> list[float]:
    """In float64: the squares of gradients near 1e-23 are 0 in float32."""
    return [float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) for gradient in gradients]


def underflow_share(values: Tensor) -> float:
    """Share of the values below their dtype's smallest normal number: they are 0 or have lost digits."""
    return float((values.abs() < torch.finfo(values.dtype).tiny).double().mean())


def first_over_last(layer_norms: Sequence[float]) -> float:
    """Below 1 the gradient vanishes on its way to the input. NaN for 0 / 0."""
    return layer_norms[0] / layer_norms[-1] if layer_norms[-1] else math.nan


def metrics_of(layers: LayerGradients) -> dict[str, float]:
    return {
        "grad/input_ratio": first_over_last(layers.input_norms),
        "grad/weight_ratio": first_over_last(layers.weight_norms),
        "grad/underflow_share": layers.underflow_share,
        **{f"grad/input/layer{layer}": norm for layer, norm in enumerate(layers.input_norms)},
        **{f"grad/weight/layer{layer}": norm for layer, norm in enumerate(layers.weight_norms)},
    }


def describe_lost_digits(layers: LayerGradients, dtype: str) -> Finding | None:
    """A warning where the ratio says more about the dtype than about the stack."""
    ratio = first_over_last(layers.input_norms)
    if not all(map(math.isfinite, (*layers.input_norms, *layers.weight_norms))):
        name, message = "gradient_overflow", f"gradients overflow {dtype}: grad/input_ratio = {ratio} means nothing"
    elif layers.underflow_share:
        name = "gradient_underflow"
        message = (
            f"{layers.underflow_share:.1%} of the gradients are below {torch.finfo(DTYPES[dtype]).tiny:.1e}, {dtype}'s "
            f"smallest normal number: they are 0 or have lost digits, and so has grad/input_ratio = {ratio:.2g}"
        )
    else:
        return None
    return Finding(name, Severity.WARNING, message, "measure in dtype: float64", 1, layers.underflow_share, 0.0)
