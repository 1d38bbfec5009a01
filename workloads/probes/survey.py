"""Finds out who is to be watched: a model's parameters as its optimiser has them. Watches nobody."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from orchestrator.trial import Finding, Severity
from workloads.engine.update import Blocks, Call, Hyper
from workloads.probes.blocks import named_blocks
from workloads.probes.probe import listed


@dataclass(frozen=True)
class Survey:
    """`blocks` are what is trained, by name; `strangers` the optimiser has and the model has not; `untrained` nobody.

    `mark` differs as soon as a parameter came, went, or was frozen.
    """

    blocks: Blocks
    strangers: Sequence[tuple[str, nn.Parameter]]
    untrained: Sequence[str]
    mark: Sequence[object]

    def untrained_finding(self, step: int) -> Finding:
        num = len(self.untrained)
        message = f"the optimiser does not have {num} of the model's parameters: {listed(self.untrained)}"
        advice = "add them to it; freeze them (requires_grad_(False)) if they are not to be trained; if another "
        advice += "optimiser has them, give each its own watch, with blocks= of what it trains"
        return Finding("not_optimized", Severity.WARNING, message, advice, step, float(num), 0.0)


def survey(model: nn.Module, optimizer: Optimizer, chosen: Blocks | None) -> Survey:
    """Only parameters of `chosen` blocks, if there are any."""
    optimized = list(optimized_by(optimizer))
    trained, own = set(optimized), set(model.parameters())
    blocks = named_blocks(model) if chosen is None else chosen
    kept = {name: [one for one in block if one in trained] for name, block in blocks.items()}
    strangers = [
        (f"parameter {place} of the optimiser, which the model does not have", one)
        for place, one in enumerate(optimized)
        if chosen is None and one.requires_grad and one not in own
    ]
    named = model.named_parameters() if chosen is None else ()
    untrained = [name for name, one in named if one.requires_grad and one not in trained]
    return Survey(
        {name: block for name, block in kept.items() if block}, strangers, untrained, mark_of(model, optimizer)
    )


def mark_of(model: nn.Module, optimizer: Optimizer) -> Sequence[object]:
    return [*map(id, trainable(model)), None, *map(id, optimized_by(optimizer))]


def optimized_by(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def trainable(module: nn.Module) -> Iterator[nn.Parameter]:
    """As `parameters()`, shared ones again and again, without the names, which take ten times as long."""
    for one in module._parameters.values():
        if one is not None and one.requires_grad:
            yield one
    for child in module._modules.values():
        if child is not None:
            yield from trainable(child)


def no_loss(call: Call, batch: Any, hyper: Hyper) -> tuple[Tensor, Any]:
    """Raises AssertionError: the watch updates nothing, the loop does."""
    raise AssertionError("a watched loop has its own loss")
