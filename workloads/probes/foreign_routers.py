"""Watches the routers of somebody else's mixture of experts by their logits. Knows no weights, capacity or padding.

Axes: B tokens of the micro-batches, padding included, E experts, K chosen experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from orchestrator.trial import Finding, Severity
from workloads.engine.precision import POLICIES, at_least_float32
from workloads.layers.router import Routing
from workloads.layers.router_metrics import router_metrics, spacing, to_floats
from workloads.probes.arrivals import Arrivals
from workloads.probes.catalogue import Thresholds
from workloads.probes.hooks import Hook
from workloads.probes.memory import is_backward
from workloads.probes.probe import Look, Probe
from workloads.probes.router import RouterProbe, choices, coarser_grid
from workloads.probes.watched import watched

UNKNOWN = ("router/dropped_share", "router/assignments")  # what becomes of a choice is the loop's own matter
FLOAT32_ADVICE = "nothing to do if that is meant; else compute the logits in float32, autocast off around them"
OUTPUT_ADVICE = "routers= takes modules whose output, or the first of several, is logits; k= of them a token chooses"


@dataclass
class HeardRouters:
    """Keeps a copy of the logits of each router's forward passes, while it listens."""

    routers: Mapping[str, tuple[nn.Module, int]]
    guarded: Callable[[Callable[[], None]], None]
    logits: dict[str, list[Tensor]] = field(init=False, default_factory=dict)
    unfit: dict[str, str] = field(init=False, default_factory=dict)  # by router, in words: outputs that are no logits
    handles: list[RemovableHandle] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._routings: dict[str, Routing] | None = None

    def listen(self) -> None:
        self.handles = [module.register_forward_hook(self._hook(name)) for name, (module, _) in self.routers.items()]

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles, self.logits, self._routings = [], {}, None

    def _hook(self, name: str) -> Hook:
        return Hook(lambda module, inputs, output: self.guarded(lambda: self._keep(name, module, output)))

    def _keep(self, name: str, module: nn.Module, output: Any) -> None:
        if not module.training or is_backward():  # evaluation, or recomputed
            return
        logits = output[0] if isinstance(output, tuple | list) and output else output
        if words := unfit(logits, self.routers[name][1]):
            self.unfit[name] = words
        else:
            self.logits.setdefault(name, []).append(logits.detach().flatten(0, -2).clone())

    def routings(self) -> dict[str, Routing]:
        """By router, over all micro-batches. One with a logit that is not finite chooses at random: it has none."""
        if self._routings is None:
            joined = {name: torch.cat(parts) for name, parts in self.logits.items()}
            self._routings = {
                name: routing_of(logits_BE, self.routers[name][1])
                for name, logits_BE in joined.items()
                if len(logits_BE) and bool(logits_BE.isfinite().all())
            }
        return self._routings


def unfit(logits: Any, k: int) -> str:
    """What makes this no logits of experts of which `k` are chosen, in words; empty if nothing does."""
    if not isinstance(logits, Tensor):
        return f"its output is a {type(logits).__name__}"
    if not logits.is_floating_point() or logits.dim() < 2:
        return f"its output is of {str(logits.dtype).removeprefix('torch.')} and of shape {tuple(logits.shape)}"
    return f"k={k} of its {logits.shape[-1]} experts cannot be chosen" if k > logits.shape[-1] else ""


def routing_of(logits_BE: Tensor, k: int) -> Routing:
    """The `k` largest logits' experts, weighted by their probabilities, as if none of them were ever full."""
    probabilities_BE = at_least_float32(logits_BE).softmax(-1)
    experts_BK = logits_BE.topk(min(k, logits_BE.shape[-1]), dim=-1).indices
    everyone_BK = torch.ones_like(experts_BK, dtype=torch.bool)
    weights_BK = probabilities_BE.gather(-1, experts_BK)
    places_BK = torch.zeros_like(experts_BK)
    return Routing(logits_BE, probabilities_BE, weights_BK, experts_BK, places_BK, everyone_BK, everyone_BK[:, 0])


def metrics_of(routings: Mapping[str, Routing]) -> dict[str, float]:
    """Of all routers together if they have as many experts, and of each by its name if there are several."""
    named: dict[str, Tensor] = {}
    if len({routing.logits_BE.shape[-1] for routing in routings.values()}) == 1:
        named |= router_metrics(list(routings.values()))
    for name, routing in routings.items() if len(routings) > 1 else ():
        named |= {f"{metric}/{name}": value for metric, value in router_metrics([routing]).items()}
    known = {metric: value for metric, value in named.items() if not metric.startswith(UNKNOWN)}
    return to_floats(known) if known else {}


@dataclass
class ForeignRouter(RouterProbe):
    """One router of somebody else's: its choices, its softmax, its gradient. `name` is what findings call it."""

    name: str = ""
    heard: Callable[[], Mapping[str, Routing]] = dict
    unfit: Mapping[str, str] = field(default_factory=dict)

    def updated(self, look: Look) -> Iterator[Finding]:
        if words := self.unfit.get(self.name):
            message = f"the choices of {self.name} are not seen: logits [..., experts] are due, but {words}"
            yield Finding("probe_failed", Severity.WARNING, message, OUTPUT_ADVICE, look.step)
        for finding in self._seen(look):
            yield replace(finding, message=finding.message.replace("layer 0", self.name))

    def _seen(self, look: Look) -> Iterator[Finding]:
        norms = {f"router {name}": norm for name, norm in watched(look).router_norms.items() if name == self.name}
        routing = self.heard().get(self.name) if look.thorough else None
        if routing is not None:
            self.num_experts = routing.logits_BE.shape[-1]
        if norms:  # what no backward pass has reached has no gradient of zero
            yield from self._without_gradient(replace(look, update=replace(look.update, norms=norms)))
        if routing is not None:
            yield from self._rounded(routing.logits_BE, look.step)
            yield from self._constant_weights(routing, 0, look.step)
            yield from self._choices(routing, choices(routing), 0, look.step)

    def _rounded(self, logits_BE: Tensor, step: int) -> Iterator[Finding]:
        """Nobody has said which dtype is meant: rounding that shows is a note, rounding that hides a warning."""
        apart = float(spacing(logits_BE.abs().amax()))
        if logits_BE.dtype.itemsize < 4:
            message = f"the logits of {self.name} are in {str(logits_BE.dtype).removeprefix('torch.')}"
            message += f": the largest are {apart:.3g} apart"
            yield Finding("router_dtype", Severity.INFO, message, FLOAT32_ADVICE, step, apart)
        elif (grid := coarser_grid(logits_BE)) is not None:
            message = f"the logits of {self.name} are in float32, and {grid} holds all of them exactly: they were"
            yield Finding("router_dtype", Severity.WARNING, message + " rounded before", FLOAT32_ADVICE, step)


@dataclass
class RouterMetrics(Probe):
    heard: HeardRouters

    def measured(self) -> Mapping[str, float]:
        return metrics_of(self.heard.routings())


def router_norms(routers: Mapping[str, tuple[nn.Module, int]], arrivals: Arrivals, scale: float) -> Mapping[str, float]:
    """Norms of the unscaled gradients of the routers that a backward pass has reached."""
    parts = {name: list(module.parameters()) for name, (module, _) in routers.items()}
    reached = {name: part for name, part in parts.items() if any(one in arrivals.norms for one in part)}
    norms = arrivals.block_norms(reached, scale) if reached else {}
    return {name: norms[name] for name in reached}


def foreign_routers(heard: HeardRouters, thresholds: Thresholds) -> list[ForeignRouter]:
    """A probe for each router; how many experts there are is seen at the first look."""
    nobodys = POLICIES["fp32"]  # which dtype is meant is not known, and not asked
    return [
        ForeignRouter(thresholds, nobodys, k, 0, _no_parts, name, heard.routings, heard.unfit)
        for name, (_, k) in heard.routers.items()
    ]


def _no_parts(seen: Any) -> tuple[Tensor, Sequence[Routing]]:
    """Raises AssertionError: a watch does not see what a loss returns beside its value."""
    raise AssertionError("a watched loop returns nothing beside its losses")
