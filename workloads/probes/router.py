"""Watches the routers of a mixture of experts: what their logits are computed in, whom they choose, what they learn.

Axes: B valid tokens of a window, E experts, K chosen experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from orchestrator.trial import Finding, Severity
from workloads.engine.precision import Precision
from workloads.layers.router import Routing, tie_share
from workloads.layers.router_metrics import joined, spacing
from workloads.probes.catalogue import Thresholds
from workloads.probes.probe import Look, Probe

ENOUGH = 16  # an expert that is due so many assignments of a window goes without any by chance in e^-16 of windows
ENOUGH_LOGITS = 64  # that all of so many lie on a coarser grid is no accident
FLOAT16_BITS = 11  # of a number, the leading 1 included; bfloat16 has 8
CAST_ADVICE = "cast the router's input, weight and logits to float32 explicitly, autocast off around it"
LOSS_ROUNDINGS = 4  # operations of the loss in float32, each off by half a unit of the last place
TERM_TOLERANCE = 1e-5  # relative: the terms are sums of float32 numbers, here of float64; they differ by 2e-7


@dataclass
class RouterProbe(Probe):
    """Holds each layer's router against what the config promises.

    `parts(seen)` takes apart what the loss returned beside its value: the task's own loss, and one routing a layer.
    `promise` is the config's precision, not the model's own word for it.
    """

    thresholds: Thresholds
    promise: Precision
    k: int
    num_experts: int
    parts: Callable[[Any], tuple[Tensor, Sequence[Routing]]]
    since: dict[str, int] = field(init=False, default_factory=dict)  # condition/layer -> the step it began at
    zero_for: dict[str, int] = field(init=False, default_factory=dict)  # router -> updates in a row without gradient
    assignments: float = field(init=False, default=0.0)  # due in this window; 0 where it was not looked at

    def updated(self, look: Look) -> Iterator[Finding]:
        if self.zero_for or 0.0 in look.update.norms.values():
            yield from self._without_gradient(look)
        self.assignments = 0.0
        if not look.thorough or not math.isfinite(loss := float(look.update.loss)):  # NaN chooses experts at random
            return
        seen = [self.parts(seen) for _, seen in look.update.seen]
        layers = [list(routings) for routings in zip(*(routings for _, routings in seen), strict=True)]
        windows = [joined(routings) for routings in layers]  # the valid tokens of all micro-batches
        chosen = [choices(window) for window in windows]
        self.assignments = float(sum(window.experts_BK.numel() for window in windows))
        task = sum(share * float(loss) for (share, _), (loss, _) in zip(look.update.seen, seen, strict=True))
        yield from self._auxiliary(look, loss - task, layers, windows, chosen)
        for layer, (window, choice) in enumerate(zip(windows, chosen, strict=True)):
            if choice.num_tokens:
                yield from self._dtype(window, layer, look.step)
                yield from self._constant_weights(window, layer, look.step)
                yield from self._choices(window, choice, layer, look.step)

    def reported(self, step: int, metrics: Mapping[str, float]) -> Iterator[Finding]:
        """Each assignment counts once: shares add up to 1, and no more is carried out than was asked for."""
        total = sum(value for name, value in metrics.items() if name.startswith("router/load/"))
        done = metrics.get("router/assignments", 0.0)
        if self.assignments and (abs(total - 1) > TERM_TOLERANCE or done > self.assignments):
            message = (
                f"the experts' load adds up to {total:.4g} of the assignments; {done:.0f} were carried out, "
                f"{self.assignments:.0f} asked for"
            )
            advice = "count each token once: recomputation under activation checkpointing must not count again"
            yield Finding("load_count", Severity.ERROR, message, advice, step, total, 1.0)

    def _without_gradient(self, look: Look) -> Iterator[Finding]:
        zero = [name for name, norm in look.update.norms.items() if name.startswith("router") and norm == 0]
        self.zero_for = {name: self.zero_for.get(name, 0) + 1 for name in zero}
        limit = self.thresholds.dead_router_updates
        dead = [name for name, count in self.zero_for.items() if count >= limit]
        if dead and self.num_experts > self.k:
            message = (
                f"{', '.join(dead)}: the gradient was exactly zero in {limit:.0f} updates; nothing is learned there"
            )
            advice = "set renormalize: false for k: 1, or look for a detach() between router and loss"
            num_updates = float(max(self.zero_for.values()))
            yield Finding("dead_router", Severity.ERROR, message, advice, look.step, num_updates, limit)

    def _dtype(self, window: Routing, layer: int, step: int) -> Iterator[Finding]:
        if wrong := wrong_dtypes(window, self.promise):
            message = f"the router of layer {layer} has {wrong}"
            yield Finding("router_dtype", Severity.ERROR, message, CAST_ADVICE, step)

    def _constant_weights(self, window: Routing, layer: int, step: int) -> Iterator[Finding]:
        """A weight of exactly 1 for every token has no gradient: neither p / p nor a saturated softmax teaches."""
        constant = self.k == 1 and self.num_experts > 1 and bool((window.weights_BK == 1).all())
        certain = constant and bool((window.probabilities_BE.amax(-1) == 1).all())
        if self._lasts("certain", layer, certain, step):  # of one window a router may well be certain
            message = f"the router of layer {layer} is certain of every token: its softmax is saturated"
            advice = "raise c_z or lower lr: the z-loss keeps logits small"
            yield Finding("dead_router", Severity.ERROR, message, advice, step, 1.0, 1.0)
        if constant and not certain:
            message = (
                f"layer {layer}: top-1 weights are renormalised to 1: the task's gradient to the router is exactly 0"
            )
            yield Finding("dead_router", Severity.ERROR, message, "set renormalize: false", step, 1.0, 1.0)

    def _auxiliary(
        self,
        look: Look,
        added: float,
        layers: Sequence[Sequence[Routing]],
        windows: Sequence[Routing],
        chosen: Sequence[Choices],
    ) -> Iterator[Finding]:
        """What the loss adds to the task's, against alpha * balance + c_z * z by their definitions."""
        alpha, c_z = float(look.hyper["alpha"]), float(look.hyper["c_z"])
        evenness = alpha * sum(balance_by_definition(choice) for choice in chosen) if alpha else 0.0
        z = c_z * sum(z_by_definition(window.logits_BE) for window in windows) if c_z else 0.0
        due = evenness + z
        tolerance = (
            LOSS_ROUNDINGS * torch.finfo(torch.float32).eps * abs(float(look.update.loss)) + TERM_TOLERANCE * due
        )
        if not abs(added - due) > tolerance:
            return
        shares = [share for share, _ in look.update.seen]
        pairs = [(share, one) for layer in layers for share, one in zip(shares, layer, strict=True)]
        with_padding = c_z * sum(share * z_by_definition(one.logits_BE) for share, one in pairs)
        guesses = {
            "the balance loss counts twice": 2 * evenness + z,
            "the z-loss counts twice": evenness + 2 * z,
            "the z-loss counts padding": evenness + with_padding,
        }
        near = [words for words, value in guesses.items() if abs(added - value) <= tolerance and value != due]
        hint = f"; that is what it would be if {near[0]}" if near else ""
        message = f"balance and z-loss add {added:.6g} to the loss; by their definitions they are {due:.6g}{hint}"
        advice = "balance: E * sum f_i P_i, z: mean of squared log-sum-exp, both over valid tokens of the window, once"
        yield Finding("auxiliary_loss", Severity.ERROR, message, advice, look.step, added, due)

    def _choices(self, window: Routing, seen: Choices, layer: int, step: int) -> Iterator[Finding]:
        """What is wrong with who was chosen, if it stays so."""
        yield from self._ties(window, seen, layer, step)
        yield from self._collapsed(seen, layer, step)
        yield from self._dead(seen, layer, step)
        yield from self._dropped(seen, layer, step)

    def _ties(self, window: Routing, seen: Choices, layer: int, step: int) -> Iterator[Finding]:
        """Ties that hide a difference: experts a hair apart are equals to the router too, whoever is chosen."""
        limit, apart = self.thresholds.tie_share, self.thresholds.tie_spacing
        epsilon = torch.finfo(window.logits_BE.dtype).eps
        may_tie = seen.largest * epsilon >= apart  # that is as far as neighbours are apart, or up to twice as far
        share = float(tie_share(window.logits_BE, self.k)) if may_tie else 0.0
        spaced = float(spacing(window.logits_BE.detach().abs().amax())) if share > limit else 0.0
        if self._lasts("ties", layer, spaced >= apart and share > limit, step):
            message = (
                f"layer {layer}: {share:.1%} of tokens tie exactly between the last expert chosen and the next; "
                f"the largest logits are rounded to {spaced:.3g}"
            )
            advice = "use precision: bf16-selective (a float32 router), or c_z from the first update on"
            yield Finding("router_ties", Severity.WARNING, message, advice, step, share, limit)

    def _collapsed(self, seen: Choices, layer: int, step: int) -> Iterator[Finding]:
        share, limit = max(seen.load) / seen.num_tokens, self.thresholds.collapse_share
        has_choice = self.num_experts > max(2, self.k) and seen.num_tokens >= ENOUGH
        if self._lasts("collapsed", layer, has_choice and share > limit, step):
            message = f"layer {layer}: one of {self.num_experts} experts is chosen by {share:.1%} of tokens"
            advice = "raise alpha, lower lr, or look at router/z: a router that is certain does not come back"
            yield Finding("router_collapsed", Severity.WARNING, message, advice, step, share, limit)

    def _dead(self, seen: Choices, layer: int, step: int) -> Iterator[Finding]:
        """The same experts without a token at every look, in windows in which each was due enough of them."""
        enough = seen.num_tokens * self.k / self.num_experts >= ENOUGH
        names = [f"dead {expert}" for expert in range(self.num_experts)]
        lasting = [
            self._lasts(name, layer, enough and load == 0, step) for name, load in zip(names, seen.load, strict=True)
        ]
        if any(lasting):
            message = f"layer {layer}: {sum(lasting)} of {self.num_experts} experts get no token at all"
            advice = "raise alpha, or use fewer experts"
            yield Finding("dead_experts", Severity.WARNING, message, advice, step, float(sum(lasting)), 0.0)

    def _dropped(self, seen: Choices, layer: int, step: int) -> Iterator[Finding]:
        limit = self.thresholds.dropped_share
        if self._lasts("dropped", layer, seen.dropped > limit, step):
            message = f"layer {layer}: {seen.dropped:.1%} of assignments find their expert full and are dropped"
            advice = "raise capacity_factor, or alpha for a more even load"
            yield Finding("tokens_dropped", Severity.WARNING, message, advice, step, seen.dropped, limit)

    def _lasts(self, condition: str, layer: int, holds: bool, step: int) -> bool:
        """True when a condition has held at every thorough look for `router_patience` updates."""
        key = f"{condition}/{layer}"
        if not holds:
            self.since.pop(key, None)
            return False
        return step - self.since.setdefault(key, step) >= self.thresholds.router_patience


class Choices(NamedTuple):
    """Who was chosen in a window. `load` counts each expert's assignments, `likely` are its mean probabilities."""

    num_tokens: int
    load: list[float]
    likely: list[float]
    dropped: float
    largest: float  # of the logits' magnitudes


@torch.no_grad()
def choices(window: Routing) -> Choices:
    """What is needed of a window, in one transfer. Sums are taken in float64."""
    num_tokens, num_experts = window.logits_BE.shape
    if not num_tokens:
        return Choices(0, [0.0] * num_experts, [0.0] * num_experts, 0.0, 0.0)
    parts = (
        torch.bincount(window.experts_BK.flatten(), minlength=num_experts),
        window.probabilities_BE.sum(0, dtype=torch.float64),
        window.kept_BK.sum().unsqueeze(0),
        torch.linalg.vector_norm(window.logits_BE, math.inf).unsqueeze(0),
    )
    values = torch.cat(parts).tolist()  # in float64, the widest among them
    load, likely, (kept, largest) = values[:num_experts], values[num_experts:-2], values[-2:]
    dropped = 1 - kept / window.kept_BK.numel()
    return Choices(num_tokens, load, [one / num_tokens for one in likely], dropped, largest)


def balance_by_definition(seen: Choices) -> float:
    """E * sum f_i P_i, in float64; see `workloads.layers.router.load_balance_loss`."""
    asked = max(sum(seen.load), 1.0)
    return len(seen.load) * sum(load / asked * likely for load, likely in zip(seen.load, seen.likely, strict=True))


def z_by_definition(logits_BE: Tensor) -> float:
    """Mean over tokens of the squared log-sum-exp, in float64; ST-MoE (Zoph et al., 2022), eq. 5."""
    logits_BE = logits_BE.detach().double()
    top_B = logits_BE.amax(-1, keepdim=True)
    squares_B = ((logits_BE - top_B).exp().sum(-1).log() + top_B.squeeze(-1)).square()
    return float(squares_B.sum() / max(len(squares_B), 1))


def wrong_dtypes(window: Routing, promise: Precision) -> str:
    """What of a routing of valid tokens is not in the dtype that was promised, in words; empty if all is."""
    parts = (
        ("logits", window.logits_BE.dtype, promise.router_logits),
        ("softmax", window.probabilities_BE.dtype, promise.router_softmax),
    )
    wrong = [f"{part} in {_short(found)} instead of {_short(due)}" for part, found, due in parts if found != due]
    if not wrong and (grid := coarser_grid(window.logits_BE)) is not None:
        wrong = [f"logits that {grid} holds exactly: they were rounded before"]
    return " and ".join(wrong)


def coarser_grid(logits_BE: Tensor) -> str | None:
    """The 16-bit format that holds every one of many float32 logits exactly, if there is one."""
    logits_BE = logits_BE[:ENOUGH_LOGITS]  # a rounding spares no token
    if logits_BE.dtype != torch.float32 or logits_BE.numel() < ENOUGH_LOGITS:
        return None
    first = logits_BE[0].tolist()  # of a healthy router it tells: no more is compared
    if any(math.frexp(logit)[0] * 2**FLOAT16_BITS % 1 for logit in first):
        return None
    if bool(logits_BE.amin() == logits_BE.amax()):  # all zero at the start, or all lost in an offset
        return None
    for dtype in (torch.bfloat16, torch.float16):
        if bool((logits_BE.to(dtype).float() == logits_BE).all()):
            return _short(dtype)
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
