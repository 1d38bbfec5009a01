"""Checks of language models: does a prediction see what comes after it, what is it asked for, does padding count?

They apply where a batch has `tokens_BT` and `targets_BT`, the model gives logits for each place, and the workload is
`causal`. That it is asked for a token near by tells a language model from a tagger, which may see all tokens.

Axes: B rows, T time, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.trial import Finding, Severity
from workloads.checks.subject import AMPLIFIED, EXACT, Subject, distance

MOVED_16_BIT = 0.05  # of a logit vector's spread: other tokens change the shapes of products, and so their rounding
LOSS_ROUNDINGS = 8  # in units of the model's epsilon
SHIFTS = (1, 0, 2, -1, -2)  # places ahead at which the token asked for is looked for, the right one first
MOST = 0.5  # of the places beyond those where chance has it so: fewer, and the targets are of another kind


@dataclass
class Watched:
    """A model call that keeps the logits it gave."""

    model: nn.Module
    logits_BTV: Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.model(*args, **kwargs)
        first = output[0] if isinstance(output, tuple | list) and output else output
        self.logits_BTV = first if isinstance(first, Tensor) and first.is_floating_point() else None
        return output


def logits_of(subject: Subject, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor] | None:
    """The loss and the logits [B, T, V] it was made of; None for what is no language model."""
    is_text = all(isinstance(getattr(batch, name, None), Tensor) for name in ("tokens_BT", "targets_BT"))
    if not (is_text and subject.workload.causal):
        return None
    call = Watched(model)
    loss, _ = subject.loss(call, batch)
    if call.logits_BTV is None or call.logits_BTV.dim() != 3 or call.logits_BTV.shape[:2] != batch.tokens_BT.shape:
        return None
    return loss, call.logits_BTV


def lengths_of(batch: Any) -> Tensor:
    """How many places of each row are no padding, [B]."""
    valid_BT = getattr(batch, "valid_BT", None)
    if valid_BT is None:
        return torch.full((len(batch.tokens_BT),), batch.tokens_BT.shape[1])
    lengths_B: Tensor = valid_BT.sum(-1)
    return lengths_B


@torch.no_grad()
def check_future(subject: Subject) -> Iterator[Finding]:
    """Other tokens from one place on: the logits before it do not move.

    A leak moves them in every row; a choice between near-equal experts that rounding turns over, in some.
    """
    subject = subject.in_float32
    if not is_language(subject):
        return
    model, batch = subject.model().eval(), subject.window[0]
    seen = logits_of(subject, model, batch)
    if seen is None or (cut := int(lengths_of(batch).min()) // 2) < 1 or seen[1].shape[-1] < 2:
        return
    before_BTV = seen[1]
    tokens_BT = batch.tokens_BT.clone()
    tokens_BT[:, cut:] = (tokens_BT[:, cut:] + 1) % before_BTV.shape[-1]
    after = logits_of(subject, model, changed(batch, tokens_BT=tokens_BT))
    assert after is not None
    spread_BT = (before_BTV - before_BTV.mean(-1, keepdim=True)).double().norm(dim=-1)
    moved_BT = (after[1] - before_BTV).double().norm(dim=-1) / spread_BT.clamp(min=1e-30)
    moved_T = moved_BT[:, :cut].amin(0)
    limit = EXACT if subject.is_exact else MOVED_16_BIT
    if float(moved_T.max()) > limit:
        places, most = int((moved_T > limit).sum()), float(moved_T.max())
        message = f"other tokens from place {cut} on move the logits of {places} places before it, by up to {most:.1%}"
        advice = "mask attention to later places and mix nothing else over time; `causal = False` if it may see them"
        yield Finding("future_leaks", Severity.ERROR, message, advice, None, most, limit)


@dataclass(frozen=True)
class Shift:
    """Which token ahead of its place most places are asked for: `share` of them; `following`: for the next one."""

    ahead: int
    share: float
    following: float
    is_near: bool  # of a language model; False: what is asked for are no tokens near by


@torch.enable_grad()
def target_shift(subject: Subject) -> Shift | None:
    """What the loss asks each place for: the only token whose logit it would raise. None for what is no model of text.

    Where tokens repeat themselves much by chance, more of them must agree.
    """
    batch = subject.combined
    seen = logits_of(subject, subject.model(), batch)
    if seen is None or not seen[1].requires_grad:
        return None
    (slope_BTV,) = torch.autograd.grad(seen[0] * subject.loss_scale, seen[1])
    asked_BT, counts_BT = slope_BTV.argmin(-1), slope_BTV.any(-1)
    shares = {ahead: equal(batch.tokens_BT, asked_BT, counts_BT, ahead) for ahead in SHIFTS}
    ahead = max(shares, key=lambda one: shares[one])
    by_chance = coincidence(batch.tokens_BT[counts_BT], asked_BT[counts_BT])
    return Shift(ahead, shares[ahead], shares[1], shares[ahead] - by_chance > MOST * (1 - by_chance))


def equal(tokens_BT: Tensor, asked_BT: Tensor, counts_BT: Tensor, ahead: int) -> float:
    """The share of places that are asked for the token `ahead`, of those where it and both neighbours count."""
    num_places = tokens_BT.shape[1]
    first, last = max(0, -ahead), num_places - max(0, ahead)
    there_BT = counts_BT[:, first + ahead : last + ahead] & counts_BT[:, first:last]
    same_BT = asked_BT[:, first:last] == tokens_BT[:, first + ahead : last + ahead]
    return float(same_BT[there_BT].double().mean()) if bool(there_BT.any()) else 0.0


def coincidence(one_N: Tensor, other_N: Tensor) -> float:
    """How often a token of one and a token of the other are the same if drawn independently."""
    size = int(torch.cat([one_N, other_N]).max()) + 1 if len(one_N) else 1
    counts = [torch.bincount(tokens_N, minlength=size).double() for tokens_N in (one_N, other_N)]
    return float(counts[0] @ counts[1]) / max(len(one_N), 1) ** 2


def is_language(subject: Subject) -> bool:
    return (found := target_shift(subject)) is not None and found.is_near


def check_targets(subject: Subject) -> Iterator[Finding]:
    """The token each place is asked for is the next one. Another one near by is a bug, other targets a note."""
    found, limit = target_shift(subject), subject.limits.unshifted_share
    if found is None or (found.ahead == 1 and found.share > limit):
        return
    if not found.is_near or found.share <= limit:
        message = f"{found.following:.0%} of the targets are the next tokens"
        advice = "fine for another task (`causal = False` says so); else look at how tokens and targets are paired"
        yield Finding("targets_not_shifted", Severity.INFO, message, advice, None, found.following, limit)
        return
    place = {0: "the very tokens that the model reads there", 2: "the tokens 2 places ahead"}
    which = place.get(found.ahead, f"tokens that came before, {-found.ahead} places back")
    message = f"{found.share:.0%} of the targets are {which}, {found.following:.0%} the next ones"
    advice = "shift targets once: that of place t is token t + 1. For a task of its own, set `causal = False`"
    severity = Severity.ERROR if found.ahead >= 0 else Severity.WARNING  # to repeat what came before may be a task
    yield Finding("targets_not_shifted", severity, message, advice, None, found.share, limit)


def check_padding(subject: Subject) -> Iterator[Finding]:
    """Neither what lies in padded places nor how many there are changes loss or gradient."""
    batch = padded(subject)
    if batch is None or logits_of(subject, subject.model(), batch) is None:
        return
    auxiliary = {name: AMPLIFIED for name in ("alpha", "c_z") if name in subject.hyper}
    row, length = shortest_row(batch)
    pairs = {
        "what lies in padded places": (batch, refilled(subject, batch)),
        "the number of padded places": (until(row, length), row),
    }
    for words, (one, other) in pairs.items():
        for hyper in ({}, auxiliary) if auxiliary and one is not batch else ({},):
            if (found := moves(subject, one, other, hyper)) is not None:
                by, limit = found
                whose = "the auxiliary losses" if hyper else "the loss"
                message = f"{words} changes {whose} or the gradient by {by:.2%}"
                advice = "take every mean over valid places only, and let attention see no padding"
                yield Finding("padding_counts", Severity.ERROR, message, advice, None, by, limit)
                return


def moves(subject: Subject, one: Any, other: Any, hyper: dict[str, float]) -> tuple[float, float] | None:
    """By how much loss or gradient, in eval mode, differ between two batches that should be alike, and the limit."""
    losses, gradients = [], []
    for batch in (one, other):
        model = subject.model().eval()
        loss, _ = subject.loss(model, batch, **hyper)
        losses.append(loss.detach().double())
        # Divided again: under a loss scale an amplified gradient would overflow float16.
        gradients.append(subject.gradient_of(loss / max(hyper.values(), default=1.0), subject.parameters(model)))
    of_loss = float((losses[1] - losses[0]).abs() / losses[0].abs().clamp(min=1e-30))
    of_gradient = distance(gradients[1], gradients[0])
    limit = LOSS_ROUNDINGS * subject.epsilon
    if of_loss > max(limit, EXACT):
        return of_loss, max(limit, EXACT)
    return (of_gradient, subject.tolerance) if of_gradient > subject.tolerance else None


def padded(subject: Subject) -> Any:
    """A batch with padding at the end of its rows: as it came, or made so where the config has a field for it."""
    batch = subject.window[0]
    if not hasattr(batch, "valid_BT") or not can_change(batch):
        return None
    num_rows, num_places = batch.tokens_BT.shape
    if batch.valid_BT is None or bool(batch.valid_BT.all()):
        if not hasattr(subject.config, "padding") or num_places < 2 or not is_language(subject):
            return None  # a model that sees all tokens must be told of padding, and may know that there is none
        lengths_B = (num_places - 1 - torch.arange(num_rows) * num_places // (2 * num_rows)).clamp(min=1)
        valid_BT = torch.arange(num_places) < lengths_B.unsqueeze(-1)
        return changed(batch, valid_BT=valid_BT)
    starts_with_tokens = bool((batch.valid_BT == (torch.arange(num_places) < lengths_of(batch).unsqueeze(-1))).all())
    return batch if starts_with_tokens else None


def refilled(subject: Subject, batch: Any) -> Any:
    """Other tokens and targets in the padded places."""
    others = {}
    for name in ("tokens_BT", "targets_BT"):
        values_BT = getattr(batch, name)
        others[name] = values_BT.where(batch.valid_BT, values_BT.roll(7, dims=1).flip(0))
    return changed(batch, **others)


def shortest_row(batch: Any) -> tuple[Any, int]:
    """The row with most padding as a batch of its own, and its length."""
    lengths_B = lengths_of(batch)
    row = int(lengths_B.where(lengths_B > 0, lengths_B.max()).argmin())
    return changed(batch, **{name: value[row : row + 1] for name, value in places_of(batch)}), int(lengths_B[row])


def until(row: Any, length: int) -> Any:
    """A row without its padding."""
    return changed(row, **{name: value[:, :length] for name, value in places_of(row)})


def places_of(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """The fields that hold something for each place."""
    names = batch._fields if hasattr(batch, "_fields") else vars(batch)
    for name in names:
        value = getattr(batch, name)
        if isinstance(value, Tensor) and value.shape[:2] == batch.tokens_BT.shape:
            yield name, value


def can_change(batch: Any) -> bool:
    return hasattr(batch, "_replace") or is_dataclass(batch)


def changed(batch: Any, **fields: Tensor) -> Any:
    """A copy of a named tuple or dataclass with other fields."""
    return batch._replace(**fields) if hasattr(batch, "_replace") else replace(batch, **fields)
