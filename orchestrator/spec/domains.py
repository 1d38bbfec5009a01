"""The domains of a sweep axis: what values it may take. Sampling needs a random generator handed in; nothing is global."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Grid:
    """Crossed and exhaustive."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class Choice:
    """One of `options`, equally likely; an option may itself be a domain."""

    options: tuple[Any, ...]


@dataclass(frozen=True)
class Uniform:
    low: float
    high: float
    log: bool = False
    step: float | None = None


@dataclass(frozen=True)
class Int:
    """Both ends included."""

    low: int
    high: int
    log: bool = False
    step: int | None = None


Domain = Grid | Choice | Uniform | Int
SAMPLED = (Choice, Uniform, Int)
