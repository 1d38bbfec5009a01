"""What a simulated trial would have reported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from orchestrator.trial import Candidate, Params


class Curve(Protocol):
    """The objective of one trial by step."""

    @property
    def steps(self) -> Sequence[int]:
        """When it reports, ascending; the last is where it ends by itself."""

    @property
    def seconds_per_step(self) -> float: ...

    def value(self, step: int) -> float | None:
        """What it reports at one of `steps`: maybe not finite; None where the report lacks the objective."""


class Curves(Protocol):
    """The curves of a sweep's trials."""

    def of(self, number: int, candidate: Candidate) -> Curve | None:
        """The curve of a trial that trains from the start; None if none is known."""

    def copied(self, number: int, source: Curve, step: int, params: Params) -> Curve:
        """The curve of a trial that goes on at `step` from the state of `source`, with these parameters."""
