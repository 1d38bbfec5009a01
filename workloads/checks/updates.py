"""Checks of the update: is its gradient that of the reported loss, weighed, cleared, clipped and scheduled rightly?"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from orchestrator.trial import Finding, Severity
from workloads.checks.subject import (
    Gradient,
    Subject,
    called_modules,
    clear,
    difference,
    distance,
    length,
    product,
    times,
)
from workloads.engine.update import Call, Hyper, Trainer, dense_real
from workloads.probes.gradients import misweighed, wrongly_clipped
from workloads.probes.probe import listed

STEP_OF_LOSS = 1e-3  # by this share a step along the gradient changes the loss: far above a float32 loss's rounding
LONGEST_STEP = 0.01  # of the weights' length: beyond it the loss is no straight line
SMOOTH = 0.05  # two slopes, of a step and of half of it, that differ by more tell of a kink and not of the gradient
CLIP_SHARE = 0.01  # of the gradient's norm: a clip that must act
UNEXPLAINED = 0.5  # of a window's deviation: what weights leave over; a loss may know its window, and so leave some
DRAWS = 4  # windows in which a rarely used part may be met
ROWS_TO_MEET = 64  # of each: with so many hardly an expert is without a token


def check_loss_factor(subject: Subject) -> Iterator[Finding]:
    """The gradient the optimiser gets of one batch, against autograd's of the reported loss."""
    exact = subject.gradient(subject.model(), subject.batch)
    if not is_usable(exact):
        return
    applied = subject.applied(subject.model(), [subject.batch])
    factor = product(applied, exact) / product(exact, exact)
    found = list(misweighed([factor], [1.0], subject.limits.weight_tolerance, None))
    yield from found
    if not found and (apart := distance(applied, exact)) > subject.tolerance:
        message = f"the gradient that reaches the optimiser differs by {apart:.1%} from that of the reported loss"
        advice = "look at what stands between the loss and the optimiser: hooks, a second loss, gradients left over"
        yield Finding("loss_factor", Severity.ERROR, message, advice, None, apart, subject.tolerance)


def check_slope(subject: Subject) -> Iterator[Finding]:
    """The gradient against the loss itself, by steps along it: independent of autograd, in float32.

    The same factor for either half of the parameters is one of the whole loss. What differs is a stop-gradient
    somewhere, most often meant, or a kink.
    """
    subject = subject.in_float32
    if not subject.is_exact:
        return
    model = subject.model()
    gradient = subject.gradient(model, subject.batch)
    ratio = measured_ratio(subject, model, gradient)
    if ratio is None or abs(ratio - 1) <= subject.limits.slope_tolerance:
        return
    ratios = [measured_ratio(subject, model, half) for half in halves(gradient)]
    is_factor = all(one is not None and abs(one - ratio) <= SMOOTH * abs(ratio) for one in ratios)
    message = f"a step along the gradient changes the loss {ratio:.3g} times as much as the gradient says"
    advice = "fine for straight-through or reversed gradients; else look for a detach() or a backward of your own"
    severity = Severity.WARNING if is_factor else Severity.INFO
    yield Finding("loss_factor", severity, message, advice, None, ratio, 1.0)


def halves(gradient: Gradient) -> Iterator[Gradient]:
    """That of the first parameters and that of the last: zeros stand for the others."""
    middle = len(gradient) // 2
    for kept in (range(middle), range(middle, len(gradient))):
        yield [one if place in kept else torch.zeros_like(one) for place, one in enumerate(gradient)]


def measured_ratio(subject: Subject, model: nn.Module, gradient: Gradient) -> float | None:
    """By what factor the loss changes more along a gradient than that says; None where rounding or a kink hides it."""
    norm, weights = length(gradient), length([dense_real(one.detach()) for one in subject.parameters(model)])
    if not 0 < norm < math.inf:
        return None
    loss = subject.loss(model, subject.batch)[0].detach().abs().item()
    step = min(STEP_OF_LOSS * loss / norm, LONGEST_STEP * weights)
    if step * norm < STEP_OF_LOSS / 10 * loss or step == 0:  # the loss hardly moves: its rounding would be measured
        return None
    long, short = (slope(subject, model, gradient, norm, part * step) / norm for part in (1.0, 0.5))
    return short if abs(long - short) <= SMOOTH * abs(short) else None


@torch.no_grad()
def slope(subject: Subject, model: nn.Module, gradient: Gradient, norm: float, step: float) -> float:
    """(L(w + s d) - L(w - s d)) / 2s for the gradient's direction d; the model is as before when it returns."""
    parameters = subject.parameters(model)
    kept = [one.detach().clone() for one in parameters]
    losses = []
    for signed in (step, -step):
        for one, old, grad in zip(parameters, kept, gradient, strict=True):
            one.copy_(old + signed / norm * (torch.view_as_complex(grad) if old.is_complex() else grad))
        losses.append(float(subject.loss(model, subject.batch)[0]))
    for one, old in zip(parameters, kept, strict=True):
        one.copy_(old)
    return (losses[0] - losses[1]) / (2 * step)


def check_accumulation(subject: Subject) -> Iterator[Finding]:
    """Three micro-batches of very unequal size against one batch of the same rows, where training splits at all."""
    if subject.config.accumulation_steps == 1:
        return
    whole, split = (of_window(subject, window, training=False) for window in ([subject.combined], subject.window))
    if not is_usable(whole):
        return
    if distance(split, whole) > subject.tolerance:
        yield from explain(subject, split, whole)
        return
    whole, split = (of_window(subject, window, training=True) for window in ([subject.combined], subject.window))
    if (apart := distance(split, whole)) > subject.tolerance:
        yield from coupling(subject, apart)


def of_window(subject: Subject, window: Sequence[Any], training: bool) -> Gradient:
    return subject.applied(subject.model().train(training), window)


def explain(subject: Subject, split: Gradient, whole: Gradient) -> Iterator[Finding]:
    """What each micro-batch counted, by least squares on the gradients they have alone."""
    alone = [of_window(subject, [micro], training=False) for micro in subject.window]
    num_valid = [micro.num_valid for micro in subject.window]
    shares = [count / sum(num_valid) for count in num_valid]
    # Gradients that cancel one another keep their rounding: it is small against them, not against what is left.
    size = sum(share * length(one) for share, one in zip(shares, alone, strict=True))
    if not (apart := length(difference(split, whole)) / size) > subject.tolerance:
        return
    gram = torch.tensor([[product(one, other) for other in alone] for one in alone], dtype=torch.float64)
    seen = torch.tensor([product(one, split) for one in alone], dtype=torch.float64)
    counted = (torch.linalg.pinv(gram, rtol=1e-6, hermitian=True) @ seen).tolist()
    tolerance = max(subject.limits.weight_tolerance, subject.tolerance)
    rebuilt = [sum(map(torch.mul, parts, counted), torch.zeros_like(parts[0])) for parts in zip(*alone, strict=True)]
    unexplained = length(difference(rebuilt, split)) / length(difference(split, whole))
    found = list(misweighed(counted, shares, tolerance, None)) if unexplained <= UNEXPLAINED else []
    yield from found
    if not found and distance([torch.stack(parts).sum(0) for parts in zip(*alone, strict=True)], whole) <= tolerance:
        factor = length(whole) / length(split)
        message = (
            f"the loss is a sum: as one batch a window has {factor:.3g} times the gradient it has in micro-batches"
        )
        advice = "return the mean over valid targets; each micro-batch's mean is weighed by its share of the window"
        yield Finding("accumulation_weights", Severity.ERROR, message, advice, None, factor, 1.0)
    elif not found:
        message = f"the loss is no mean over rows: split into micro-batches the gradient differs by {apart:.1%}"
        advice = (
            "are [B] and [B, 1] broadcast to [B, B] in it? What a term needs of the whole window it takes in `prepare`"
        )
        yield Finding("batch_coupling", Severity.WARNING, message, advice, None, apart, subject.tolerance)


def coupling(subject: Subject, apart: float) -> Iterator[Finding]:
    """Equal in eval mode only: what works in training mode is named."""
    named = list(subject.model().named_modules())
    norms = [name for name, module in named if isinstance(module, _BatchNorm)]
    others = [name for name, module in named if isinstance(module, _DropoutNd) and module.p > 0]
    fields = {"dropout": 0.0, "capacity_factor": None}
    others += [name for name, off in fields.items() if getattr(subject.config, name, off) != off]
    kind = f"batch norm in {', '.join(norms[:4])}" if norms else ", ".join(others[:4]) or "something of training mode"
    message = f"{kind} makes the split into micro-batches matter: their gradient differs by {apart:.1%}"
    advice = (
        "use group or layer norm, or compare only runs that are split alike" if norms else "expected; nothing to do"
    )
    severity = Severity.WARNING if norms else Severity.INFO
    yield Finding("batch_coupling", severity, message, advice, None, apart, subject.tolerance)


def check_cleared(subject: Subject) -> Iterator[Finding]:
    """Two updates from the same weights on the same batch: the second has the first one's gradient, not twice it."""
    model = subject.model()
    trainer, state = subject.trainer(model), [*model.parameters(), *model.buffers()]
    kept, seen = [one.detach().clone() for one in state], []
    for _ in range(2):
        with torch.no_grad():
            for one, old in zip(state, kept, strict=True):
                one.copy_(old)
        seen.append(subject.taken(trainer, [subject.batch]))
    owned = owned_by(trainer)  # `check_optimized` names the others: nobody clears their gradients
    held = [id(one) in owned for one in trainer.parameters]
    pairs = [(first, second) for first, second, is_held in zip(*seen, held, strict=True) if is_held and first.any()]
    if kept_on := sum(distance([second], [2 * first]) < SMOOTH for first, second in pairs):
        message = f"a second update of the same batch has twice the gradient, in {kept_on} of {len(pairs)} parameters"
        advice = "call optimizer.zero_grad() once an update, before its first backward pass"
        yield Finding("gradients_not_cleared", Severity.ERROR, message, advice, None, 2.0, 1.0)


def check_clip(subject: Subject) -> Iterator[Finding]:
    """A clip that must act leaves exactly its norm, of the unscaled gradient, in the same direction."""
    if subject.config.clip_norm is None:
        return  # that nothing is clipped then is what `check_loss_factor` sees
    free = subject.applied(subject.model(), [subject.batch])
    if not is_usable(free):
        return
    clip_norm = float(f"{CLIP_SHARE * length(free):.3g}")  # of few digits: it stands in the message
    clipped = subject.applied(subject.model(), [subject.batch], clip_norm)
    found = list(wrongly_clipped(length(free), length(clipped), clip_norm, subject.limits.weight_tolerance, None))
    yield from found
    if not found and (apart := distance(times(length(free) / clip_norm, clipped), free)) > subject.tolerance:
        message = f"the clip turns the gradient: its direction differs by {apart:.1%}"
        advice = "clip the norm of all gradients together"
        yield Finding("clip_order", Severity.WARNING, message, advice, None, apart, subject.tolerance)


def check_schedule(subject: Subject) -> Iterator[Finding]:
    """A window of three micro-batches advances the schedule by one; an update that is not applied does not."""
    if not subject.trainer(subject.model()).schedules:
        return
    for words, due in (("an update of three micro-batches", 1), ("an update that was not applied", 0)):
        trainer = subject.trainer(subject.model())
        if not due:
            trainer.loss = lambda call, batch, hyper: overflown(subject, call, batch, hyper)
        before = [schedule.last_epoch for schedule in trainer.schedules]
        if subject.update(trainer, subject.window).applied != bool(due):
            continue
        for schedule, old in zip(trainer.schedules, before, strict=True):
            if (moved := schedule.last_epoch - old) != due:
                message = f"{words} advances the schedule by {moved} instead of {due}"
                advice = "step the schedule once for each applied update: not for each micro-batch or skipped update"
                yield Finding("schedule_pace", Severity.ERROR, message, advice, None, float(moved), float(due))
                return


def overflown(subject: Subject, call: Call, batch: Any, hyper: Hyper) -> tuple[Tensor, Any]:
    loss, seen = subject.workload.loss(call, batch, hyper)
    return loss * math.inf, seen


def check_reachable(subject: Subject) -> Iterator[Finding]:
    """Every trained parameter is in the graph of the loss. A part that merely got nothing to do is given more rows."""
    model = subject.model()
    missing = unreached(subject, model, [subject.combined])
    if not missing:
        return
    source = torch.Generator().manual_seed(0)
    num_rows = max(ROWS_TO_MEET, len(torch.cat(subject.indices)))
    draws = [torch.randint(subject.data.num_rows, (num_rows,), generator=source) for _ in range(DRAWS)]
    with called_modules(model) as called:
        missing &= unreached(subject, model, (subject.batch_of(rows, 0) for rows in draws))
    if names := sorted(missing - idle_siblings(subject, model, missing, called)):
        message = f"{listed(names)}: the loss does not depend on what is there"
        advice = "look for detach(), no_grad(), or a part that is never called; freeze it if that is meant"
        yield Finding("no_gradient", Severity.ERROR, message, advice, None, float(len(names)), 0.0)


def check_optimized(subject: Subject) -> Iterator[Finding]:
    """Every trained parameter is in a group of the optimiser."""
    model = subject.model()
    held = owned_by(subject.trainer(model))
    if names := [name for name, one in trained(subject, model).items() if id(one) not in held]:
        message = f"{listed(names)}: no group of the optimiser has what is there"
        advice = "add it in `parameter_groups`; freeze it (requires_grad = False) if it is to stay as it is"
        yield Finding("not_optimized", Severity.ERROR, message, advice, None, float(len(names)), 0.0)


def owned_by(trainer: Trainer) -> set[int]:
    """The ids of the parameters that a trainer's optimiser has."""
    return {id(one) for group in trainer.optimizer.param_groups for one in group["params"]}


def unreached(subject: Subject, model: nn.Module, batches: Iterable[Any]) -> set[str]:
    """The names of trained parameters from which no path leads to the loss of any of the batches."""
    missing = trained(subject, model)
    for batch in batches:
        loss, _ = subject.loss(model, batch)
        if missing and loss.requires_grad:
            clear(list(missing.values()))
            loss.backward()  # type: ignore[no-untyped-call]
            missing = {name: one for name, one in missing.items() if one.grad is None}
    return set(missing)


def idle_siblings(subject: Subject, model: nn.Module, missing: set[str], called: set[str]) -> set[str]:
    """Of the missing: those of an expert without tokens. Never called, while others of its list have a gradient."""
    reached = {re.sub(r"\d+", "#", name) for name in trained(subject, model).keys() - missing}
    return {name for name in missing if name.rpartition(".")[0] not in called and re.sub(r"\d+", "#", name) in reached}


def trained(subject: Subject, model: nn.Module) -> dict[str, nn.Parameter]:
    owned = {id(one) for one in subject.parameters(model)}
    return {name: one for name, one in model.named_parameters() if id(one) in owned}


def is_usable(gradient: Gradient) -> bool:
    """Finite and not all zeros."""
    return 0 < length(gradient) < math.inf
