"""Somebody's own training loop, with its variations and its bugs, for what `watch` says of them. Tests nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from orchestrator.trial import Finding
from workloads.probes.watch import Watch, watch

UPDATES = 30


class Net(nn.Module):
    """Two layers and a readout on 4 numbers; `around` is put between the layers."""

    def __init__(self, around: Callable[[nn.Module, Tensor], Tensor] = lambda layer, hidden: layer(hidden)) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.around = around

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(torch.tanh(self.around(self.second, torch.tanh(self.first(rows)))))


class Odd(nn.Module):
    """A table with sparse gradients, one matrix in two places, complex weights, a frozen part, a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4, sparse=True)
        self.first, self.again, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.again.weight = self.first.weight
        self.wave = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64) / 4)
        self.bare = nn.Parameter(torch.ones(4))
        self.last = nn.Linear(4, 1)
        self.frozen.requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        looked_up = self.table((rows.abs() * 2).long().clamp(max=5)).sum(1)  # a row may look up a place twice
        hidden = self.frozen(self.again(torch.tanh(self.first(rows * self.bare)))) + looked_up
        return self.last(hidden + (hidden.to(torch.complex64) @ self.wave).abs())


def checkpointed(reentrant: bool) -> Callable[[], nn.Module]:
    return lambda: Net(lambda layer, hidden: checkpoint(layer, hidden, use_reentrant=reentrant))


def adamw(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **settings)


def sgd(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **settings)


def nothing(*seen: Any) -> None:
    """What a loop does where the loop under test has a bug, or a watch."""


def fill_with_noise(step: int, model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.normal_()


@dataclass
class Loop:
    """Somebody's own training loop. The fields are its variations, among them its bugs."""

    make: Callable[[], nn.Module] = Net
    optimize: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    scale: float | None = None
    unscales: bool = True
    clips_first: bool = False
    clip_norm: float | None = 0.1
    micro_batches: int = 1
    clears: str = "before"  # the forward pass, "after" it (before the backward pass), after the "step", or "never"
    to_none: bool = True
    compiled: bool = False
    closure: bool = False
    factor: float = 1.0  # between the loss and its backward pass
    hands: str = "after"  # the backward pass, "before" it, or after the "step"
    raw: bool = False  # handed over before it is divided by the number of micro-batches
    clears_each: bool = False  # zero_grad before each micro-batch
    steps_plainly: bool = False  # optimizer.step() in spite of a scaler
    spoil: Callable[[int, nn.Module], None] = nothing  # just before the step
    losses: list[float] = field(default_factory=list)
    health: Watch | None = None

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = self.make()
        self.optimizer = self.optimize(self.model)
        self.scaler = None if self.scale is None else torch.amp.GradScaler("cpu", init_scale=self.scale)
        self.call = torch.compile(self.model, backend="aot_eager") if self.compiled else self.model
        self.handed = torch.zeros(())
        self.rows = torch.randn(UPDATES, self.micro_batches, 16, 4, generator=torch.Generator().manual_seed(1))

    def watched(self, **settings: Any) -> Loop:
        self.health = watch(self.call, self.optimizer, **{"scaler": self.scaler, "on_finding": nothing, **settings})
        return self

    def run(self, updates: int = UPDATES, before_clip: Look = nothing, after: Look = nothing) -> Loop:
        for step in range(updates):
            self.update(step, lambda: before_clip(self))
            after(self)
        return self

    def update(self, step: int, before_clip: Callable[[], None]) -> None:
        if self.closure:
            self.optimizer.step(lambda: self.backward(step, before_clip))
            return
        self.backward(step, before_clip)
        if self.scaler is None or self.steps_plainly:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.hand("step")
        self.clear("step")

    def backward(self, step: int, before_clip: Callable[[], None]) -> float:
        self.clear("before")
        for place, rows in enumerate(self.rows[step]):
            self.hand("step" if place else "")  # of the micro-batch before
            mean = F.mse_loss(self.call(rows), rows.sum(-1, keepdim=True))
            loss = mean / self.micro_batches
            self.handed = mean if self.raw else loss
            if place == 0:
                self.clear("after")
            if self.clears_each:
                self.optimizer.zero_grad()
            self.hand("before")
            loss = loss * self.factor
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            self.losses.append(loss.item())
            self.hand("after")
        before_clip()
        if self.clips_first:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        if self.scaler and self.unscales:
            self.scaler.unscale_(self.optimizer)
        if self.clip_norm and not self.clips_first:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.spoil(step, self.model)
        return self.losses[-1]

    def hand(self, when: str) -> None:
        if self.health and self.hands == when:
            self.health.loss(self.handed)

    def clear(self, when: str) -> None:
        if self.clears == when:
            self.optimizer.zero_grad(set_to_none=self.to_none)


Look = Callable[[Loop], None]


def findings_of(loop: Loop, **settings: Any) -> list[Finding]:
    loop.watched(**settings).run()
    assert loop.health
    loop.health.close()
    return loop.health.findings


def names(findings: list[Finding]) -> list[str]:
    return [finding.check_name for finding in findings]
