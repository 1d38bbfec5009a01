"""How many trials a cell needs to tell two shares apart (diverged, unstable). Exact, and without any library.

The test is Fisher's exact one, two-sided, with as many trials in either cell: it holds at every n, where the normal
approximation fails at the handful of seeds that people can afford. Both margins being equal, its distribution is
symmetric, so that its two-sided p is twice the smaller tail.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import asin, ceil, comb, sqrt

ALPHA = 0.05 * (1 + 1e-12)  # 95 % confidence; a p of exactly 5 % counts, whatever the last bit
POWER = 0.8
MAX_TRIALS = 1000  # nobody trains more of one setting; the search for a number ends here
Z_ALPHA, Z_POWER = 1.959963984540054, 0.8416212335729143  # normal quantiles of 97.5 % and of 80 %


def is_told_apart(failures: int, other_failures: int, n: int) -> bool:
    """True if Fisher's exact test calls `failures` of n and `other_failures` of n different (two-sided p <= 5 %)."""
    fewer, more = sorted((failures, other_failures))
    term = comb(n, fewer) * comb(n, more) / comb(2 * n, fewer + more)  # hypergeometric; two bins need no logarithms
    tail = term
    while fewer > 0 and more < n and term > 1e-16 * tail and 2 * tail <= ALPHA:
        term *= fewer * (n - more) / ((n - fewer + 1) * (more + 1))
        tail, fewer, more = tail + term, fewer - 1, more + 1
    return failures != other_failures and 2 * tail <= ALPHA


def power(share: float, other: float, n: int) -> float:
    """The probability that n trials in each of two cells with these true shares are told apart."""
    weights, others = _binomial(n, share), _binomial(n, other)
    reached = [0.0] * (n + 2)  # probability that the other cell has at least so many failures
    for b in range(n, -1, -1):
        reached[b] = reached[b + 1] + others[b]
    below = [1.0 - value for value in reached]  # fewer than so many
    edges = _edges(n)
    # By symmetry b is told apart from below where n - b is told apart from above n - a.
    return sum(weights[a] * (reached[edges[a]] + below[n - edges[n - a] + 1]) for a in range(n + 1))


def trials_needed(share: float, other: float) -> int | None:
    """The least n at which cells with these shares are told apart with 80 % power; None beyond `MAX_TRIALS`.

    Power is no smooth function of n: a few larger n may fall short of 80 % again, by a point or two.
    """
    if share == other:
        return None
    # Cohen (1988), arcsine approximation. Fisher's test needs more, so the search may start a little below it.
    distance = abs(2 * asin(sqrt(share)) - 2 * asin(sqrt(other)))
    start = max(2, ceil(0.95 * ((Z_ALPHA + Z_POWER) / distance) ** 2))
    return next((n for n in range(start, MAX_TRIALS + 1) if power(share, other, n) >= POWER), None)


def share_told_from_none(n: int) -> float | None:
    """The least share, in whole per cent, that n trials a cell tell from a cell that never fails; None: not even 1."""
    shares = (percent / 100 for percent in range(1, 101))
    return next((share for share in shares if power(0.0, share, n) >= POWER), None)


@lru_cache(maxsize=4)
def _edges(n: int) -> list[int]:
    """For each a, the least b > a that is told apart from it, or n + 1. It never falls as a grows."""

    def walk() -> Iterator[int]:
        b = 0
        for a in range(n + 1):
            b = max(b, a + 1)
            while b <= n and not is_told_apart(a, b, n):
                b += 1
            yield b

    return list(walk())


def _binomial(n: int, share: float) -> list[float]:
    """Probabilities of 0 .. n failures."""
    return [comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(n + 1)]
