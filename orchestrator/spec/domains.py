"""The domains of a sweep axis: what values it may take. Sampling needs a random generator handed in; nothing is global.

A stepped domain holds `low + i * step`; the last value is the largest that does not pass `high`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeGuard

from orchestrator.trial import canonical_json


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
    """A float between both ends. `log` draws evenly in the logarithm."""

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
NUMBERS = (Uniform, Int)


def sample(domain: Any, rng: random.Random) -> Any:
    """One value of a sampled domain; anything that is no domain is its own only value."""
    if isinstance(domain, Choice):
        return sample(domain.options[rng.randrange(len(domain.options))], rng)
    if isinstance(domain, Grid):
        raise TypeError("a grid is crossed, not sampled")
    if not isinstance(domain, NUMBERS):
        return domain
    if domain.log:
        return nearest_value(domain, _sample_log(domain, rng))
    count = lattice_count(domain)
    if count is None:
        return domain.low + (domain.high - domain.low) * rng.random()
    return lattice_value(domain, rng.randrange(count))


def _sample_log(domain: Uniform | Int, rng: random.Random) -> float:
    # Half a step beyond both ends gives the end values their full share before rounding (as Optuna does for integers).
    half = (_step(domain) or 0) / 2
    low, high = max(domain.low - half, domain.low / 2), domain.high + half
    return math.exp(math.log(low) + (math.log(high) - math.log(low)) * rng.random())


def _step(domain: Uniform | Int) -> float | None:
    return (domain.step or 1) if isinstance(domain, Int) else domain.step


def lattice_count(domain: Uniform | Int) -> int | None:
    """How many values a number domain has; None for a continuous one."""
    step = _step(domain)
    if step is None:
        return None
    return int((_exact(domain.high) - _exact(domain.low)) // _exact(step)) + 1


def lattice_value(domain: Uniform | Int, index: int) -> float | int:
    """The value number `index` of a stepped domain, as a person would write it: 0.3, never 0.30000000000000004."""
    step = _step(domain)
    assert step is not None
    if isinstance(domain, Int):
        return domain.low + index * int(step)
    return float(_exact(domain.low) + index * _exact(step))


def nearest_value(domain: Uniform | Int, number: float) -> float | int:
    """The domain's value closest to `number`."""
    count = lattice_count(domain)
    if count is None:
        return min(max(float(number), domain.low), domain.high)
    step = _step(domain)
    assert step is not None
    index = round((number - domain.low) / step)
    return lattice_value(domain, min(max(index, 0), count - 1))


def _exact(number: float) -> Decimal:
    return Decimal(repr(number))


def last_value(domain: Uniform | Int) -> float | int:
    """The largest value: `high`, unless `step` passes over it."""
    count = lattice_count(domain)
    return domain.high if count is None else lattice_value(domain, count - 1)


def ends(domain: Any) -> tuple[Any, ...]:
    """The values that stand for a domain when combinations are checked: all listed ones, both ends of a range."""
    if isinstance(domain, Grid):
        return domain.values
    if isinstance(domain, Choice):
        return distinct(value for option in domain.options for value in ends(option))
    if isinstance(domain, NUMBERS):
        return (domain.low, last_value(domain))
    return (domain,)


def values_of(domain: Any, limit: int) -> tuple[Any, ...] | None:
    """All distinct values of a domain; None when it is continuous or has more than `limit`."""
    if isinstance(domain, Grid):
        return domain.values
    if isinstance(domain, NUMBERS):
        count = lattice_count(domain)
        if count is None or count > limit:
            return None
        return tuple(lattice_value(domain, index) for index in range(count))
    if not isinstance(domain, Choice):
        return (domain,)
    parts = [values_of(option, limit) for option in domain.options]
    if any(part is None for part in parts):
        return None
    values = distinct(value for part in parts if part for value in part)
    return values if len(values) <= limit else None


def contains(domain: Any, value: Any) -> bool:
    """True if `value` is one that `domain` can give."""
    if isinstance(domain, Choice):
        return any(contains(option, value) for option in domain.options)
    if isinstance(domain, Grid):
        return any(same_value(value, item) for item in domain.values)
    if not isinstance(domain, NUMBERS):
        return same_value(domain, value)
    if not is_number(value) or not domain.low <= value <= domain.high:
        return False
    return math.isclose(nearest_value(domain, value), value, rel_tol=1e-12, abs_tol=1e-300)


def can_be_drawn(domain: Any, value: Any) -> bool:
    """True if `domain` gives just this value now and then; one value of a range without steps never comes."""
    if isinstance(domain, Choice):
        return any(can_be_drawn(option, value) for option in domain.options)
    if isinstance(domain, NUMBERS) and lattice_count(domain) is None:
        return False
    return contains(domain, value)


def is_number(value: Any) -> TypeGuard[int | float]:
    """True for an int or a float, infinite ones too; a bool is none here."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def value_key(value: Any) -> str:
    """Text that is equal for equal values: 1 and 1.0 agree (JSON stores do not keep them apart), 1 and true do not."""
    return canonical_json(_whole(value))


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list | tuple):
        return [_whole(item) for item in value]
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return value


def quick_key(value: Any) -> Hashable:
    """Equal for the same values as `value_key`, and made in a fraction of its time for plain ones."""
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        return value
    return (value_key(value),)


def same_value(left: Any, right: Any) -> bool:
    """As `value_key` has it, only quicker for the plain values of most axes."""
    if type(left) is type(right) and isinstance(left, bool | int | float | str):
        return bool(left == right)
    return value_key(left) == value_key(right)


def distinct(values: Iterable[Any]) -> tuple[Any, ...]:
    """The values in order, each once."""
    seen: dict[str, Any] = {}
    for value in values:
        seen.setdefault(value_key(value), value)
    return tuple(seen.values())
