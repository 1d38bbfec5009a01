"""What is differentiated, written once for every engine: any number type with +, *, ** and relu() will do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from orchestrator.workload import Context
from workloads.engine.random import generator
from workloads.scalar_autograd.config import Config


class Expression(NamedTuple):
    """A function of `leaves`: `build` computes it from any engine's numbers. `names` are the leaves' own, or none."""

    leaves: Sequence[float]
    build: Callable[[Sequence[Any]], Any]
    names: Sequence[str] = ()


def expression_of(config: Config, context: Context) -> Expression:
    """The seed is asked for in either case: a product has no use for it, and a sweep over seeds may hold one."""
    context.seed("init")
    return product(config) if config.expression == "product" else mlp(config, context)


def product(config: Config) -> Expression:
    """relu(a b + c) a: 7 numbers, and a gradient of `a` that has two contributions."""
    return Expression([config.a, config.b, config.c], lambda abc: (abc[0] * abc[1] + abc[2]).relu() * abc[0], "abc")


def mlp(config: Config, context: Context) -> Expression:
    """The summed squared error of a ReLU network with a linear last layer, as a function of its weights."""
    widths = [config.num_inputs, *config.layers]
    init, data = generator(context, "init"), generator(context, "data")
    leaves: list[float] = []
    for width_in, width_out in pairwise(widths):
        for _ in range(width_out):
            weights = torch.empty(width_in, dtype=torch.float64).uniform_(-1, 1, generator=init)
            leaves += [*weights.tolist(), 0.0]
    rows = torch.randn(config.num_examples, config.num_inputs, dtype=torch.float64, generator=data).tolist()

    def build(parameters: Sequence[Any]) -> Any:
        outputs = [(out, (-1) ** i) for i, row in enumerate(rows) for out in network(parameters, row, config.layers)]
        return sum((out - target) ** 2 for out, target in outputs)

    return Expression(leaves, build)


def network(parameters: Sequence[Any], inputs: Sequence[Any], layers: Sequence[int]) -> Sequence[Any]:
    """The outputs for one row. Parameters come layer by layer and neuron by neuron: its weights, then its bias."""
    start = 0
    for depth, width in enumerate(layers):
        size = len(inputs) + 1
        ends = range(start + size, start + size * width + 1, size)
        sums = [neuron(parameters[end - size : end], inputs) for end in ends]
        inputs = [total.relu() for total in sums] if depth < len(layers) - 1 else sums
        start += size * width
    return inputs


def neuron(parameters: Sequence[Any], inputs: Sequence[Any]) -> Any:
    *weights, bias = parameters
    return sum((weight * value for weight, value in zip(weights, inputs, strict=True)), bias)
