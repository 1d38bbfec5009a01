"""Watches what a language model is asked for. Next-token prediction only: other tasks have other targets.

Axes: B rows, T time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from orchestrator.trial import Finding, Severity
from workloads.probes.catalogue import DEFAULTS, Thresholds
from workloads.probes.probe import Look, Probe


def unshifted(
    tokens_BT: Tensor,
    targets_BT: Tensor,
    valid_BT: Tensor | None,
    step: int | None,
    limit: float = DEFAULTS.unshifted_share,
) -> Iterator[Finding]:
    """Whether the model is asked for what it has just read: the target of a place is its own token, not the next.

    In a text of one symbol both are the same, and nothing can be told.
    """
    places = targets_BT[:, :-1], tokens_BT[:, :-1], tokens_BT[:, 1:]
    if valid_BT is not None:
        places = tuple(place[valid_BT[:, 1:]] for place in places)  # type: ignore[assignment]
    target, own, following = places
    same = int((target == own).sum()) / max(target.numel(), 1)
    if same <= limit:  # so it is in a healthy batch: no more is counted
        return
    right = int((target == following).sum()) / target.numel()
    if right < same:
        message = f"{same:.0%} of the targets are the very tokens that the model reads there, {right:.0%} the next ones"
        advice = "shift the targets by one: the target of place t is token t + 1"
        yield Finding("targets_not_shifted", Severity.ERROR, message, advice, step, same, limit)


@dataclass
class TargetsProbe(Probe):
    """Looks at batches that have `tokens_BT`, `targets_BT` and `valid_BT`."""

    thresholds: Thresholds = DEFAULTS

    def updated(self, look: Look) -> Iterator[Finding]:
        if look.thorough:
            first = look.window[0]
            parts = (first.tokens_BT, first.targets_BT, first.valid_BT)  # type: ignore[attr-defined]
            yield from unshifted(*parts, look.step, self.thresholds.unshifted_share)
