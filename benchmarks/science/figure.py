"""What a published figure is and when ours agrees with it. Runs nothing and reads no file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class Agreement(StrEnum):
    AGREES = "agrees"
    DIFFERS = "differs"
    CANNOT = "not reproducible here"
    NOT_RUN = "not run"


# exact    arithmetic or determinism: held tightly
# fitted   the publication leaves task or convention open, and one that gives its figures was searched for
# open     a claim that may fail here for a known reason, said in `note`: compared, and neither outcome is an error
# own      found by a sweep here and published nowhere: held, so that a change is noticed
# cannot   needs what is not here, said in `note`: what we get instead is shown where there is something to show
Kind = Literal["exact", "fitted", "open", "own", "cannot"]


@dataclass(frozen=True)
class Figure:
    """A published figure, the query that gives ours, and how far the two may be apart.

    `query` is SQL over the views and gives one number a row, as a rule one row a seed; each has to be within `low` and
    `high`, inclusive; None is no bound. `sweep` is empty where no sweep here could show the figure.
    """

    sweep: str
    claim: str
    published: str
    source: str
    kind: Kind
    query: str = ""
    low: float | None = None
    high: float | None = None
    note: str = ""


@dataclass(frozen=True)
class ShownByTest:
    """A published figure that is arithmetic on a few numbers: no sweep trains or varies anything to show it."""

    claim: str
    published: str
    source: str
    accepted: str
    test: str  # file::name


def judge(figure: Figure, values: Sequence[float] | None) -> Agreement:
    """`values` are what the query gave, None if the sweep has not run. Neither NaN nor an empty answer ever agrees."""
    if figure.kind == "cannot":
        return Agreement.CANNOT
    if values is None:
        return Agreement.NOT_RUN
    return Agreement.AGREES if values and all(_within(figure, value) for value in values) else Agreement.DIFFERS


def is_failure(figure: Figure, agreement: Agreement) -> bool:
    """True for a figure that ought to agree and does not."""
    return agreement == Agreement.DIFFERS and figure.kind in ("exact", "fitted", "own")


def _within(figure: Figure, value: float) -> bool:
    low = -math.inf if figure.low is None else figure.low
    high = math.inf if figure.high is None else figure.high
    return math.isfinite(value) and low <= value <= high
