"""What a loop asks of `watch`, and hands over to it, checked where it enters. Looks at no value of a tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from orchestrator.trial import Finding
from workloads.engine.update import Blocks
from workloads.layers.router import Router
from workloads.probes.catalogue import NEVER, THRESHOLDS, Thresholds
from workloads.probes.survey import optimized_by

Mistakes = Iterator[TypeError | ValueError]


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


def refuse(*mistakes: Mistakes) -> None:
    """Raises all of them at once, one a line, if there are any: a TypeError if each is one, else a ValueError."""
    found = [mistake for some in mistakes for mistake in some]
    if found:
        kind = TypeError if all(isinstance(mistake, TypeError) for mistake in found) else ValueError
        raise kind("\n".join(map(str, found)))


def is_number(value: Any) -> bool:
    """True for those of other libraries too, but not for True."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    """True for whole numbers from 1 on."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def wrong_parts(model: Any, optimizer: Any, scaler: Any, on_finding: Any) -> Mistakes:
    for name, part, kind in (("model", model, nn.Module), ("optimizer", optimizer, Optimizer)):
        if not isinstance(part, kind):
            yield TypeError(f"{name}: {kind.__name__} is due, this is a {type(part).__name__}")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        yield TypeError(f"scaler: a GradScaler is due, this is a {type(scaler).__name__}")
    if not callable(on_finding):
        yield TypeError(f"on_finding: something to call with a Finding is due, this is a {type(on_finding).__name__}")


def wrong_numbers(every: Any, clip_norm: Any, k: Any) -> Mistakes:
    if not is_count(every):
        yield ValueError(f"every={every!r}: looks at every so many updates, a whole number; 1 is each of them")
    if clip_norm is not None and not is_number(clip_norm):
        yield TypeError(f"clip_norm={clip_norm!r}: a number is due, that of your clip_grad_norm_")
    elif clip_norm is not None and not clip_norm > 0:
        yield ValueError(f"clip_norm={clip_norm}: a norm above 0 is due; infinity if the loop does not clip")
    if k is not None and not is_count(k):
        yield ValueError(f"k={k!r}: how many experts a token chooses, a whole number from 1 on")


def wrong_memory(memory: Any, model: Any) -> Mistakes:
    if not isinstance(memory, bool):
        yield TypeError(f"memory={memory!r}: True or False is due")
    elif memory and hasattr(model, "_orig_mod"):
        yield ValueError("memory=True: a compiled model cannot be looked into; watch it once before it is compiled")


def wrong_thresholds(changed: Any) -> Mistakes:
    if changed is None:
        return
    if not isinstance(changed, Mapping):
        yield TypeError(f"thresholds: limits by name are due, as in {{'spike_sigmas': 8}}, not a {_kind(changed)}")
        return
    for name, limit in changed.items():
        if name not in THRESHOLDS:
            near = get_close_matches(str(name), THRESHOLDS, 1, 0.0)[0]
            yield ValueError(f"thresholds: there is no {name!r}; did you mean {near!r}?")
        elif not is_number(limit):
            yield TypeError(f"thresholds: {name}={limit!r}: a number is due; the default is {THRESHOLDS[name]}")
        elif words := THRESHOLDS[name].refusal(min(float(limit), NEVER)):
            yield ValueError(f"thresholds: {name}={limit}: {words} is due; the default is {THRESHOLDS[name]}")


def limits(changed: Mapping[str, float] | None) -> Thresholds:
    return Thresholds.of({name: min(float(limit), NEVER) for name, limit in (changed or {}).items()})


def with_lists(blocks: Any) -> Any:
    """Goes through what can be gone through but once; what makes no sense is left as it is."""
    if not isinstance(blocks, Mapping):
        return blocks
    wrong = (nn.Module, Tensor, str, Mapping)
    return {
        name: list(block) if isinstance(block, Iterable) and not isinstance(block, wrong) else block
        for name, block in blocks.items()
    }


def wrong_blocks(blocks: Any, model: Any, optimizer: Any) -> Mistakes:
    """Parameters that the optimiser does not have are no mistake yet: they may be frozen."""
    if blocks is None:
        return
    if not isinstance(blocks, Mapping) or any(not isinstance(block, list) for block in blocks.values()):
        yield TypeError("blocks: parameters by name are due, as in {'head': list(model.head.parameters())}")
        return
    if not blocks:
        yield ValueError("blocks: there is none; leave blocks= out to watch all of the model")
    for name, block in blocks.items():
        yield from _wrong_block(name, block)
    if isinstance(model, nn.Module) and isinstance(optimizer, Optimizer):
        yield from _wrong_owners(blocks, set(model.parameters()), set(optimized_by(optimizer)))
    times = Counter(id(one) for block in blocks.values() for one in block)
    twice = [name for name, block in blocks.items() if any(times[id(one)] > 1 for one in block)]
    if twice:
        yield ValueError(f"blocks: a parameter is there twice, in {' and '.join(map(repr, twice))}: once is due")


def _wrong_block(name: Any, block: list[Any]) -> Mistakes:
    if not isinstance(name, str):
        yield TypeError(f"blocks: the name {name!r} is a {_kind(name)}, text is due")
    if not block:
        yield ValueError(f"blocks: {name!r} has no parameters")
    if odd := [one for one in block if not isinstance(one, Tensor)]:
        yield TypeError(f"blocks: {name!r} holds {odd[0]!r}; the parameters themselves are due")


def _wrong_owners(blocks: Mapping[str, list[Any]], own: set[Any], optimized: set[Any]) -> Mistakes:
    tensors = {name: {one for one in block if isinstance(one, Tensor)} for name, block in blocks.items()}
    strange = [name for name, block in tensors.items() if block - own - optimized]
    if strange:
        names = " and ".join(map(repr, strange))
        yield ValueError(f"blocks: there is something in {names} that neither model nor optimiser has")
    elif any(tensors.values()) and not any(block & optimized for block in tensors.values()):
        yield ValueError("blocks: the optimiser has none of these parameters")


def wrong_routers(routers: Any, k: Any, model: Any) -> Mistakes:
    if routers is None:
        return
    if not isinstance(routers, Mapping) or not all(isinstance(one, nn.Module) for one in routers.values()):
        yield TypeError("routers: modules by name are due, as in {'layer 0': model.layers[0].gate}")
        return
    if routers and k is None:
        yield ValueError("routers: k= is due too, the number of experts that a token chooses")
    modules = set(model.modules()) if isinstance(model, nn.Module) else set(routers.values())
    for name, router in routers.items():
        if not isinstance(name, str):
            yield TypeError(f"routers: the name {name!r} is a {_kind(name)}, text is due")
        if router not in modules:
            yield ValueError(f"routers: {name!r} is no part of the model")
        num_experts = getattr(router, "out_features", None)  # others tell at their first forward pass
        if is_count(k) and is_count(num_experts) and k > num_experts:
            yield ValueError(f"routers: k={k} experts per token, but {name!r} has {num_experts}")


def chosen_routers(
    model: nn.Module, routers: Mapping[str, nn.Module] | None, k: int | None
) -> Iterator[tuple[str, tuple[nn.Module, int]]]:
    """Those given, or the model's own `Router`s, whose owners know their k."""
    if routers is not None:
        assert k is not None or not routers
        yield from ((name, (router, int(k or 0))) for name, router in routers.items())
        return
    for name, module in model.named_modules():
        if isinstance(module, Router):
            num_chosen: Any = k or getattr(model.get_submodule(name.rpartition(".")[0]), "k", None)
            if is_count(num_chosen):
                yield name, (module, int(num_chosen))


def scalar(what: str, value: Any) -> Tensor | float:
    """What a loop hands over. Raises TypeError for what is no real number, ValueError for more than one."""
    if not isinstance(value, Tensor | Real) or (isinstance(value, Tensor) and value.is_complex()):
        raise TypeError(f"{what}: a real number is due, as a tensor or not; this is {value!r:.80}, a {_kind(value)}")
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{what}: a scalar is due, this has shape {tuple(value.shape)}; .mean(), perhaps, or .sum()")
    return value if isinstance(value, Tensor) else float(value)


def _kind(value: Any) -> str:
    return type(value).__name__
