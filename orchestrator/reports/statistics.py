"""The few statistics a comparison needs. Takes plain numbers; refuses to average what is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, stdev

Z_95 = 1.959963984540054  # two-sided 95 % quantile of the normal distribution


def finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def mean_and_spread(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation of the finite values; None where there are too few, or no float holds it."""
    numbers = finite(values)
    return _held(fmean, numbers, 1), _held(stdev, numbers, 2)


def _held(statistic: Callable[[Sequence[float]], float], numbers: Sequence[float], at_least: int) -> float | None:
    try:
        return statistic(numbers) if len(numbers) >= at_least else None
    except OverflowError:  # values about 1e308: a run that has all but diverged
        return None


def wilson(successes: int, n: int) -> tuple[float, float] | None:
    """95 % interval of a share (Wilson, 1927), within 0..1; None for n = 0. Holds for 0 of n and n of n too."""
    if n == 0:
        return None
    share, z2 = successes / n, Z_95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def geometric_mean_ratio(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Geometric mean of right/left over pairs of positive numbers; None if a pair is not positive, or there is none."""
    if not pairs or any(left <= 0 or right <= 0 for left, right in pairs):
        return None
    return math.exp(fmean(math.log(right / left) for left, right in pairs))
