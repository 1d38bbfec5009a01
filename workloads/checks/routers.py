"""Checks of mixtures of experts: do task, z-loss and balance loss reach the router, and by their definitions?

They apply where the loss takes `c_z` and `alpha`, gives routings beside its value, and the model has routers of
`workloads.layers.router`. With a router of zeros both auxiliary losses are known in closed form.

Axes: B tokens, E experts, K chosen experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from orchestrator.trial import Finding, Severity
from workloads.checks.subject import AMPLIFIED, EXACT, Gradient, Subject, difference, distance, length, product, times
from workloads.engine.precision import POLICIES
from workloads.layers.router import Router, Routing
from workloads.layers.router_metrics import joined
from workloads.probes.router import CAST_ADVICE, wrong_dtypes

NUM_UPDATES = 3  # after which an expert whose output starts from zero lets the router's gradient through
ROUNDED = 0.05  # relative: a gradient in 16 bits is a difference of two rounded ones
OFF: dict[str, float] = {"c_z": 0.0, "alpha": 0.0}


def has_routers(subject: Subject) -> bool:
    """True where there is a choice to be made and its losses are scalars of the config."""
    model = subject.model()
    if not OFF.keys() <= subject.hyper.keys():
        return False
    return any(num_experts(router) > 1 for _, router in routers_of(model)) and bool(routings(subject))


def num_experts(router: Router) -> int:
    return len(router.weight)


def routings_of(seen: Any) -> list[Routing]:
    """All routings in what a loss gave beside its value, in their order."""
    if isinstance(seen, Routing):
        return [seen]
    parts = seen.values() if isinstance(seen, Mapping) else seen if isinstance(seen, tuple | list) else ()
    return [routing for part in parts for routing in routings_of(part)]


def check_z_loss(subject: Subject) -> Iterator[Finding]:
    """(ln E)^2 a layer for logits of zero, linear in c_z, with a gradient for every router."""
    if not has_routers(subject):
        return
    value, due = by_definition(subject, "c_z", lambda routing: math.log(routing.logits_BE.shape[-1]) ** 2)
    if abs(value - due) > EXACT * due:
        message = f"with a router of zeros the z-loss is {value:.6g} at c_z = 1; mean log-sum-exp squared is {due:.6g}"
        advice = "square the log-sum-exp of the raw logits, mean over valid tokens, summed over layers"
        yield Finding("z_loss", Severity.ERROR, message, advice, None, value, due)
    found = list(reaches(subject, "c_z", "z_loss", "z-loss"))
    yield from found
    if not found and subject.in_float32.is_exact:
        yield from never_off(subject.in_float32)


def never_off(subject: Subject) -> Iterator[Finding]:
    """A z-loss at c_z = 0. It alone shifts all logits of a token; task and balance loss see their differences."""
    none, one = (shifts(subject, {**OFF, "c_z": value}) for value in (0.0, 1.0))
    for name, (shift, whole) in none.items():
        of_z = difference(one[name][0], shift)
        part = product(shift, of_z) / product(of_z, of_z)
        if length(shift) > EXACT * length(whole) and distance(times(part, of_z), shift) <= ROUNDED:
            message = f"at c_z = 0 the gradient at {name} still holds that of a z-loss with c_z = {part:.3g}"
            advice = "leave the z-loss out of the loss, or multiply it by c_z alone"
            yield Finding("z_loss", Severity.ERROR, message, advice, None, part, 0.0)
            return


def shifts(subject: Subject, hyper: Mapping[str, float]) -> dict[str, tuple[Gradient, Gradient]]:
    """The gradient of each router's weight [E, D] summed over the experts, and all of it."""
    found = {name: gradient[:1] for name, gradient in router_gradients(subject, hyper).items()}
    return {name: ([weight.sum(0)], [weight]) for name, (weight,) in found.items()}


def check_balance_loss(subject: Subject) -> Iterator[Finding]:
    """1 a layer for logits of zero, whatever the loads, and linear in alpha, with a gradient for every router."""
    if not has_routers(subject):
        return
    value, due = by_definition(subject, "alpha", lambda routing: 1.0)
    limit = max(EXACT, torch.finfo(POLICIES[subject.config.precision].router_softmax).eps)  # 1/3 is none of bfloat16's
    if abs(value - due) > limit * due:
        ratio = value / due
        is_multiple = ratio > 1.5 and abs(ratio - round(ratio)) <= limit * ratio
        message = f"with a router of zeros the balance loss is {value:.6g} at alpha = 1 instead of {due:.6g}"
        if is_multiple:
            message += f": the shares of the experts add up to {ratio:.4g}"
        advice = "E * sum f_i P_i: f_i are shares of all assignments, each counted once, also under recomputation"
        check = "load_count" if is_multiple else "balance_loss"
        yield Finding(check, Severity.ERROR, message, advice, None, value, due)
    if any(routing.experts_BK.shape[-1] < routing.logits_BE.shape[-1] for routing in routings(subject)):
        yield from reaches(subject, "alpha", "balance_loss", "balance loss")  # else it is constant


def check_window_load(subject: Subject) -> Iterator[Finding]:
    """The balance loss of three micro-batches is that of one batch: its loads are those of the whole window."""
    subject = subject.in_float32
    if subject.config.accumulation_steps == 1 or not subject.is_exact or not has_routers(subject):
        return
    apart, without = (split_apart(subject, {**OFF, "alpha": alpha}) for alpha in (AMPLIFIED, 0.0))
    if apart > EXACT >= without:  # else the split is wrong without a balance loss: another check's matter
        message = (
            f"the balance loss of a window in micro-batches has another gradient than as one batch: {apart:.1%} apart"
        )
        advice = (
            "count each expert's load over the whole window (in `prepare`), or compare only runs that are split alike"
        )
        yield Finding("balance_loss", Severity.WARNING, message, advice, None, apart, EXACT)


def split_apart(subject: Subject, hyper: Mapping[str, float]) -> float:
    """How far a window's gradient is from that of the same rows as one batch, in eval mode."""
    windows = subject.window, [subject.combined]
    split, whole = (subject.applied(subject.model().eval(), window, **hyper) for window in windows)
    return distance(split, whole)


def routings(subject: Subject) -> list[Routing]:
    with torch.no_grad():
        return routings_of(subject.loss(subject.model(), subject.batch)[1])


@torch.no_grad()
def by_definition(subject: Subject, coefficient: str, due: Any) -> tuple[float, float]:
    """What the term adds to the loss when the routers' weights are zero, and what it should add."""
    model = subject.model()
    for _, router in routers_of(model):
        for parameter in router.parameters():
            parameter.zero_()
    hyper = {**OFF, **({"offset": 0.0} if "offset" in subject.hyper else {})}
    without, _ = subject.loss(model, subject.batch, **hyper)
    with_term, seen = subject.loss(model, subject.batch, **{**hyper, coefficient: 1.0})
    return float(with_term - without), sum(due(routing) for routing in routings_of(seen))


def reaches(subject: Subject, coefficient: str, check: str, words: str) -> Iterator[Finding]:
    """The gradient of the term at each router: there, and twice as large for twice the coefficient."""
    none, one, two = (router_gradients(subject, {**OFF, coefficient: value}) for value in (0.0, 1.0, 2.0))
    for name in none:
        of_one, of_two = difference(one[name], none[name]), difference(two[name], none[name])
        if length(of_one) == 0:
            message = f"the {words} has no gradient at {name}: {coefficient} changes nothing that the router learns"
            advice = "compute it from the router's own logits, not from a detached or recomputed copy"
            yield Finding(check, Severity.ERROR, message, advice, None, 0.0)
            return
        limit = max(subject.tolerance, EXACT if subject.is_exact else ROUNDED)
        if (apart := distance(of_two, times(2.0, of_one))) > limit:
            message = f"twice the {coefficient} is not twice the {words}'s gradient at {name}: {apart:.1%} apart"
            advice = f"multiply the {words} by {coefficient} once, and by nothing that depends on it"
            yield Finding(check, Severity.ERROR, message, advice, None, apart, limit)
            return


def routers_of(model: nn.Module) -> list[tuple[str, Router]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Router)]


def router_gradients(
    subject: Subject, hyper: Mapping[str, float], model: nn.Module | None = None
) -> dict[str, Gradient]:
    """For each router that is trained, by its module's name."""
    model = subject.model() if model is None else model
    named = [(name, router) for name, router in routers_of(model) if router.weight.requires_grad]
    loss, _ = subject.loss(model, subject.batch, **hyper)
    found = iter(subject.gradient_of(loss, [one for _, router in named for one in router.parameters()]))
    return {name: [next(found) for _ in router.parameters()] for name, router in named}


def check_dead_router(subject: Subject) -> Iterator[Finding]:
    """Without auxiliary losses the task itself must have a gradient for every router."""
    if not has_routers(subject) or getattr(subject.config, "allow_dead_router", False):
        return
    if all(routing.experts_BK.shape[-1] == routing.logits_BE.shape[-1] for routing in routings(subject)):
        return
    if not (dead := without_gradient(subject, subject.model())):
        return
    model = subject.model()
    trainer = subject.trainer(model)
    for _ in range(NUM_UPDATES):
        subject.update(trainer, subject.window)
    if dead := [name for name in dead if name in without_gradient(subject, model)]:
        message = f"{', '.join(dead[:4])}: the task's gradient is exactly zero, whatever the router chooses"
        advice = "top-1 weights must not be renormalised (set renormalize: false), nor detached from the router"
        yield Finding("dead_router", Severity.ERROR, message, advice, None, 0.0)


def without_gradient(subject: Subject, model: nn.Module) -> list[str]:
    return [name for name, found in router_gradients(subject, OFF, model).items() if length(found) == 0]


def check_router_dtype(subject: Subject) -> Iterator[Finding]:
    """Logits and softmax in the dtype that the precision promises, also where autocast surrounds the model."""
    if not has_routers(subject):
        return
    promise = POLICIES[subject.config.precision]
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            seen = routings(subject)
        for layer, routing in enumerate(seen):
            if wrong := wrong_dtypes(joined([routing]), promise):
                message = f"the router of layer {layer} has {wrong}{' under autocast' * autocast}"
                yield Finding("router_dtype", Severity.ERROR, message, CAST_ADVICE)
                return
