"""Compares the gradients of our engine with those of another one. Holds no derivative of its own."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from orchestrator.trial import Finding, Report, Severity
from orchestrator.workload import Context
from workloads.scalar_autograd.config import METRICS, Config
from workloads.scalar_autograd.engine import Accumulate, Value, gradients
from workloads.scalar_autograd.expressions import Expression, expression_of

TOLERANCES = {
    "torch32": 1e-6,  # of the largest gradient; float32 has an epsilon of 1.2e-7 and was seen to differ by 3e-7
    "torch64": 1e-12,
    "micrograd": 1e-12,
}


class Differentiated(NamedTuple):
    output: float
    gradients: Sequence[float]  # by the leaves, in their order
    num_nodes: int


def by_us(expression: Expression, accumulate: Accumulate) -> Differentiated:
    leaves = [Value(number) for number in expression.leaves]
    output = expression.build(leaves)
    gradient = gradients(output, accumulate)
    return Differentiated(output.data, [gradient.get(leaf, 0.0) for leaf in leaves], len(gradient))


def by_reference(expression: Expression, reference: str) -> Sequence[float]:
    """The gradients by the leaves, from another engine. Raises ModuleNotFoundError if it is not installed."""
    if reference == "micrograd":
        return by_micrograd(expression)
    return by_torch(expression, torch.float32 if reference == "torch32" else torch.float64)


def by_torch(expression: Expression, dtype: torch.dtype) -> Sequence[float]:
    leaves = [torch.tensor(number, dtype=dtype, requires_grad=True) for number in expression.leaves]
    found = torch.autograd.grad(expression.build(leaves), leaves)
    return [gradient.item() for gradient in found]


def by_micrograd(expression: Expression) -> Sequence[float]:
    """By micrograd's engine. Its `nn` is left alone: it draws weights from Python's global generator."""
    try:
        value: Any = importlib.import_module("micrograd.engine").Value
    except ModuleNotFoundError as error:
        message = "reference: micrograd needs a package: pip install --no-deps micrograd==0.1.0"
        raise ModuleNotFoundError(message, name="micrograd") from error
    leaves = [value(number) for number in expression.leaves]
    expression.build(leaves).backward()
    return [leaf.grad for leaf in leaves]


def measure(expression: Expression, ours: Differentiated, reference: Sequence[float]) -> dict[str, float]:
    largest = max(abs(gradient) for gradient in reference)
    worst = max(abs(mine - theirs) for mine, theirs in zip(ours.gradients, reference, strict=True))
    return {
        "num_nodes": ours.num_nodes,
        "num_parameters": len(expression.leaves),
        "output": ours.output,
        **{f"gradient/{name}": value for name, value in zip(expression.names, ours.gradients, strict=False)},
        "grad/max_abs": largest,
        "max_abs_diff": worst,
        "relative_diff": worst / largest if largest else math.nan,
    }


def judge(metrics: dict[str, float], reference: str) -> Finding | None:
    """What is wrong with the comparison, if anything: it shows nothing, or it shows a wrong gradient."""
    if metrics["grad/max_abs"] == 0:
        message = "every gradient is 0, so that any engine would agree; the network is dead for this seed"
        return Finding("vacuous_comparison", Severity.WARNING, message, "take another seed", 1, 0.0, 0.0)
    worst, tolerance = metrics["relative_diff"], TOLERANCES[reference]
    if worst <= tolerance:
        return None
    message = f"a gradient differs from {reference}'s by {worst:.2g} of the largest one"
    return Finding("wrong_gradient", Severity.ERROR, message, "set accumulate: add", 1, worst, tolerance)


class ScalarAutograd:
    """One comparison, one report."""

    Config = Config
    metrics = METRICS

    def run(self, config: Any, context: Context) -> Iterator[Report]:
        """Reports once on a `Config`. A wrong gradient, and a comparison that shows nothing, are findings."""
        expression = expression_of(config, context)
        ours = by_us(expression, config.accumulate)
        metrics = measure(expression, ours, by_reference(expression, config.reference))
        finding = judge(metrics, config.reference)
        if finding is not None:
            context.finding(finding)
        yield Report(1, metrics)
