"""Watches what a language model is asked for. Next-token prediction only: other tasks have other targets.

Axes: B rows, T time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from orchestrator.trial import Finding, Severity
from workloads.probes.probe import Look, Probe

SAME_SHARE = 0.9  # of the places; in prose one character in thirty is the one before it again


def unshifted(tokens_BT: Tensor, targets_BT: Tensor, valid_BT: Tensor | None, step: int | None) -> Iterator[Finding]:
    """Whether the model is asked for what it has just read: the target of a place is its own token, not the next.

    In a text of one symbol both are the same, and nothing can be told.
    """
    places = targets_BT[:, :-1], tokens_BT[:, :-1], tokens_BT[:, 1:]
    if valid_BT is not None:
        places = tuple(place[valid_BT[:, 1:]] for place in places)  # type: ignore[assignment]
    target, own, following = places
    if target.numel() == 0:
        return
    same, right = float((target == own).double().mean()), float((target == following).double().mean())
    if same > SAME_SHARE and right < same:
        message = f"{same:.0%} of the targets are the very tokens that the model reads there, {right:.0%} the next ones"
        advice = "shift the targets by one: the target of place t is token t + 1"
        yield Finding("targets_not_shifted", Severity.ERROR, message, advice, step, same, SAME_SHARE)


@dataclass
class TargetsProbe(Probe):
    """Looks at batches that have `tokens_BT`, `targets_BT` and `valid_BT`."""

    def updated(self, look: Look) -> Iterator[Finding]:
        if look.thorough:
            first = look.window[0]
            yield from unshifted(first.tokens_BT, first.targets_BT, first.valid_BT, look.step)  # type: ignore[attr-defined]
