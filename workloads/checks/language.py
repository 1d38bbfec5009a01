"""Checks of language models: does a prediction see what comes after it, what is it asked for, does padding count?

They apply where a batch has `tokens_BT` and `targets_BT`, and the model gives logits for each place.

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
from workloads.probes.targets import SAME_SHARE, unshifted

MOVED_16_BIT = 0.05  # of a logit vector's spread: other tokens change the shapes of products, and so their rounding
LOSS_ROUNDINGS = 8  # in units of the model's epsilon
FARTHEST = 4  # places ahead at which a wrong shift is looked for


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
    if not all(isinstance(getattr(batch, name, None), Tensor) for name in ("tokens_BT", "targets_BT")):
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
        advice = "mask attention to later places, and mix nothing else over time: the model reads what it should say"
        yield Finding("future_leaks", Severity.ERROR, message, advice, None, most, limit)


def check_targets(subject: Subject) -> Iterator[Finding]:
    """Which token each place is asked for: the only one whose logit the loss would raise."""
    batch = subject.batch
    seen = logits_of(subject, subject.model(), batch)
    if seen is None or not seen[1].requires_grad:
        return
    (slope_BTV,) = torch.autograd.grad(seen[0] * subject.loss_scale, seen[1])
    asked_BT, counts_BT = slope_BTV.argmin(-1), slope_BTV.any(-1)
    both_BT = counts_BT & counts_BT.roll(1, dims=1)  # `unshifted` looks up a place by the one after it
    found = list(unshifted(batch.tokens_BT, asked_BT, both_BT, None))
    yield from found or too_far(batch.tokens_BT, asked_BT, counts_BT)


def too_far(tokens_BT: Tensor, asked_BT: Tensor, counts_BT: Tensor) -> Iterator[Finding]:
    """Targets that are neither the token of their place nor the next one.

    Those of a place beyond are shifted twice. Others may be another task's, so that is but a note.
    """
    shares = {}
    for ahead in range(1, min(FARTHEST, tokens_BT.shape[1] - 1) + 1):
        both_BT = counts_BT[:, :-ahead] & counts_BT[:, ahead:]  # what follows the last target is padding
        if bool(both_BT.any()):
            shares[ahead] = float((asked_BT[:, :-ahead] == tokens_BT[:, ahead:])[both_BT].double().mean())
    if (following := shares.get(1, 1.0)) > SAME_SHARE:
        return
    ahead = max(shares, key=lambda one: shares[one])
    if shares[ahead] > SAME_SHARE:
        message = (
            f"{shares[ahead]:.0%} of the targets are the tokens {ahead} places ahead, {following:.0%} the next ones"
        )
        advice = "shift the targets once: the target of place t is token t + 1"
        yield Finding("targets_not_shifted", Severity.ERROR, message, advice, None, shares[ahead], SAME_SHARE)
    else:
        message = f"{following:.0%} of the targets are the next tokens"
        advice = "fine for other tasks; for next-token prediction look at how tokens and targets are paired"
        yield Finding("targets_not_shifted", Severity.INFO, message, advice, None, following, SAME_SHARE)


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
                advice = "take every mean over valid places only: sum where valid, divided by their number"
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
        if not hasattr(subject.config, "padding") or num_places < 2:
            return None
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
