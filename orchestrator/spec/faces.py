"""What the spec asks of a workload, without importing any: `orchestrator.workload.Description` has this shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol


class FieldFace(Protocol):
    """One field a sweep may set. `check` returns a value in its declared type or raises ValueError."""

    @property
    def name(self) -> str: ...
    @property
    def type_name(self) -> str: ...
    @property
    def default(self) -> Any: ...
    @property
    def required(self) -> bool: ...
    @property
    def fusible(self) -> bool:
        """True if it is a scalar that may change while a trial trains, or differ inside a group."""

    @property
    def check(self) -> Callable[[Any], Any]: ...
    @property
    def choices(self) -> tuple[Any, ...]: ...


def accepts(face: FieldFace, value: Any) -> bool:
    """True if the field may have this value."""
    try:
        face.check(value)
    except ValueError:
        return False
    return True


class WorkloadFace(Protocol):
    """A workload as far as a sweep file is concerned."""

    @property
    def name(self) -> str: ...
    @property
    def metrics(self) -> tuple[str, ...]:
        """Names and patterns (`router/load/*`) of what it reports; for hints only."""

    @property
    def checks(self) -> tuple[str, ...]:
        """Names of what its probes and checks may find."""

    @property
    def early_checks(self) -> tuple[str, ...]:
        """Those of them that are found before training or not at all."""

    @property
    def thresholds(self) -> Mapping[str, float]:
        """The limits that these hold what they see against, by name, with their defaults."""

    def fields(self) -> Mapping[str, FieldFace]:
        """By dotted name."""

    def declares(self, metric: str) -> bool: ...

    def resolve(self, params: Mapping[str, Any]) -> object:
        """Raises ValueError (pydantic's ValidationError is one) when the values do not fit together."""


WorkloadOf = Callable[[str], WorkloadFace]
"""Finds a workload by name; raises NotFound, whose message becomes a problem of the file."""
