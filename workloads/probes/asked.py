"""What a loop asks of `watch`, checked where it enters. Looks at no tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from orchestrator.trial import Finding
from workloads.engine.update import Blocks
from workloads.layers.router import Router
from workloads.probes.catalogue import NEVER, THRESHOLDS, Thresholds


@dataclass(frozen=True)
class Asked:
    """What is wanted of a watch. `routers` are modules by name, with the number of experts a token chooses."""

    scaler: torch.amp.GradScaler
    every: int
    clip_norm: float | None
    blocks: Blocks | None
    routers: Mapping[str, tuple[nn.Module, int]]
    memory: bool
    thresholds: Thresholds
    on_finding: Callable[[Finding], None]


def checked_every(every: Any) -> int:
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"every={every!r}: looks at every so many updates, a whole number; 1 is each of them")
    return every


def checked_clip_norm(clip_norm: Any) -> float | None:
    if clip_norm is None:
        return None
    if not isinstance(clip_norm, int | float):
        raise TypeError(f"clip_norm={clip_norm!r}: a number is due, that of your clip_grad_norm_")
    if not clip_norm > 0:
        raise ValueError(f"clip_norm={clip_norm}: a norm above 0 is due; infinity if the loop does not clip")
    return float(clip_norm)


def checked_thresholds(changed: Mapping[str, float]) -> Thresholds:
    for name, limit in changed.items():
        if name not in THRESHOLDS:
            near = get_close_matches(name, THRESHOLDS, 1, 0.0)[0]
            raise ValueError(f"thresholds: there is no {name!r}; did you mean {near!r}?")
        if not isinstance(limit, int | float):
            raise TypeError(f"thresholds: {name}={limit!r}: a number is due; the default is {THRESHOLDS[name]}")
        if words := THRESHOLDS[name].refusal(min(limit, NEVER)):
            raise ValueError(f"thresholds: {name}={limit}: {words} is due; the default is {THRESHOLDS[name]}")
    return Thresholds.of({name: min(limit, NEVER) for name, limit in changed.items()})


def checked_parts(model: Any, optimizer: Any, scaler: Any, on_finding: Any) -> None:
    for name, part, kind in (("model", model, nn.Module), ("optimizer", optimizer, Optimizer)):
        if not isinstance(part, kind):
            raise TypeError(f"{name}: {kind.__name__} is due, this is a {type(part).__name__}")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler: a GradScaler is due, this is a {type(scaler).__name__}")
    if not callable(on_finding):
        raise TypeError(f"on_finding: something to call with a Finding is due, this is a {type(on_finding).__name__}")


def checked_blocks(blocks: Any) -> Blocks | None:
    if blocks is None:
        return None
    if not isinstance(blocks, Mapping) or any(isinstance(block, nn.Module | str) for block in blocks.values()):
        raise TypeError("blocks: parameters by name are due, as in {'head': list(model.head.parameters())}")
    return {name: list(block) for name, block in blocks.items()}


def checked_routers(
    model: nn.Module, routers: Mapping[str, nn.Module] | None, k: int | None
) -> Mapping[str, tuple[nn.Module, int]]:
    """Those given, or the model's own `Router`s, whose owners know their k."""
    if k is not None and (not isinstance(k, int) or k < 1):
        raise ValueError(f"k={k!r}: how many experts a token chooses, a whole number from 1 on")
    if routers is None:
        return dict(own_routers(model, k))
    if not isinstance(routers, Mapping) or not all(isinstance(one, nn.Module) for one in routers.values()):
        raise TypeError("routers: modules by name are due, as in {'layer 0': model.layers[0].gate}")
    if not routers:
        return {}
    if k is None:
        raise ValueError("routers: k= is due too, the number of experts that a token chooses")
    return {name: (router, k) for name, router in routers.items()}


def own_routers(model: nn.Module, k: int | None) -> Iterator[tuple[str, tuple[nn.Module, int]]]:
    for name, module in model.named_modules():
        if isinstance(module, Router):
            num_chosen = k or getattr(model.get_submodule(name.rpartition(".")[0]), "k", None)
            if isinstance(num_chosen, int):
                yield name, (module, num_chosen)
