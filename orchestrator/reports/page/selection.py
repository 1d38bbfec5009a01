"""Chooses what a report's figures show: which trials, which of their points, in which colours. Draws nothing.

A figure of thousands of trials shows a choice of them and says so; a choice always holds the best and the worst.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from orchestrator.reports.cells import Cell, Record, alike, cells_of, diverged_of, is_diverged, is_sound, unstable_of
from orchestrator.reports.page.drawing import LABEL_LENGTH, Curve, Relation, Row, Share
from orchestrator.reports.page.svg import NUM_SHADES, label
from orchestrator.reports.source import Query
from orchestrator.reports.statistics import finite, mean_and_spread, wilson
from orchestrator.reports.table import short
from orchestrator.spec.domains import is_number
from orchestrator.trial import canonical_json

Item = TypeVar("Item")

MAX_CURVES = 96  # of one metric
MAX_CURVE_POINTS = 8_000  # of one metric
MAX_PANELS = 6
MAX_ROWS = 24
MAX_ROW_DOTS = 40
MAX_DOTS = 400  # of one metric over one axis
MAX_LINES = 40
MAX_WORDS = 12  # along an axis
MAX_NAME = 40  # characters of a value that names something
MIN_NAME = 4  # of one of many values
BETWEEN = " · "  # values
NEUTRAL = "ink"  # the colour of what has no value of the shaded axis, or several
NUM_BANDS = 5  # of values that are too many for a colour each
LARGEST = 1e150  # beyond it, where squares are no numbers, no axis can be computed: as good as infinite here

# Of each of `bins` spans of steps the lowest and the highest value and the first that is no number; a trial's two ends.
POINTS = """
    select trial, step, value
    from (
        select
            trial, step, value, is_finite,
            row_number() over (partition by trial, bin, is_finite order by value, step) as from_lowest,
            row_number() over (partition by trial, bin, is_finite order by value desc, step) as from_highest,
            row_number() over (partition by trial, bin, is_finite order by step) as from_first,
            step in (min(step) over (partition by trial), max(step) over (partition by trial)) as is_end
        from (
            select
                trial, step, value,
                abs(value) <= %(largest)s as is_finite,
                floor(step::float8 * %(bins)s / (1 + max(step) over ())) as bin
            from orch.metrics where sweep = %(sweep)s and key = %(metric)s and trial = any(%(trials)s)
        ) as point
    ) as ranked
    where is_end or case when is_finite then from_lowest = 1 or from_highest = 1 else from_first = 1 end
    order by trial, step
"""


@dataclass(frozen=True)
class Shades:
    """The colour of each trial, by the values of one axis; without an axis all have the neutral one."""

    axis: str | None
    legend: Sequence[tuple[str, str]]  # colour, what it stands for
    of: Mapping[int, str]  # by the trial's number

    def shared(self, members: Iterable[Record]) -> str:
        """The one colour of all members, or the neutral one."""
        colours = {self.of[one["trial"]] for one in members}
        return colours.pop() if len(colours) == 1 else NEUTRAL


def shades(records: Sequence[Record], axes: Iterable[str]) -> Shades:
    """By the first of the axes that has a few values, or numbers."""
    for axis in axes:
        values = _distinct(record["config"].get(axis) for record in records)
        if len(values) < 2:
            continue
        if all(map(_is_place, values.values())):
            return _by_number(axis, records, sorted(values.values()))
        if len(values) <= NUM_SHADES:
            colours = {key: f"c{place}" for place, key in enumerate(values)}
            of = {record["trial"]: colours[canonical_json(record["config"].get(axis))] for record in records}
            return Shades(axis, [(colours[key], _word(value)) for key, value in values.items()], of)
    return Shades(None, [], {record["trial"]: NEUTRAL for record in records})


def _by_number(axis: str, records: Sequence[Record], values: Sequence[float]) -> Shades:
    """From dark to bright; neighbours share a colour where there are too many."""
    num = len(values) if len(values) <= NUM_SHADES else NUM_BANDS
    band = {canonical_json(value): place * num // len(values) for place, value in enumerate(values)}
    colours = [f"s{round(place * (NUM_SHADES - 1) / (num - 1))}" for place in range(num)]
    legend = []
    for place, colour in enumerate(colours):
        members = [value for value in values if band[canonical_json(value)] == place]
        ends = dict.fromkeys((short(members[0]), short(members[-1])))
        legend.append((colour, " to ".join(ends)))
    return Shades(axis, legend, {one["trial"]: colours[band[canonical_json(one["config"][axis])]] for one in records})


def panels(
    records: Sequence[Record], axes: Sequence[str], shaded: str | None
) -> tuple[list[tuple[str, list[Record]]], list[str]]:
    """The trials in as many panels as their other axes make, and the axes that would make too many."""
    split: list[str] = []
    pooled = []
    for axis in axes:
        if axis == shaded:
            continue
        num = len(cells_of(records, [*split, axis]))
        if num <= MAX_PANELS:
            split.append(axis)
        else:
            pooled.append(axis)
    named = [(named_values(split, values), members) for values, members in cells_of(records, split)]
    return named, pooled


def chosen(cells: Sequence[Sequence[Record]], metric: str, mode: str, limit: int) -> list[Record]:
    """At most `limit` trials: of every cell the same number, spread evenly from its best to its worst.

    If that is one, it is the median. A trial without a finite last value is worse than all others. Of too many cells,
    some that are spread evenly in their order.
    """
    if sum(map(len, cells)) <= limit:
        return [record for cell in cells for record in cell]
    some = _spread(cells, limit)
    return [
        record
        for cell in some
        for record in _spread(sorted(cell, key=lambda one: badness(one, metric, mode)), max(1, limit // len(some)))
    ]


def badness(record: Record, metric: str, mode: str) -> tuple[bool, float]:
    """Sorts the best first; what diverged or has no finite value comes last."""
    value = _value(record, metric)
    if value is None:
        return True, 0.0
    return False, value if mode == "min" else -value


def _value(record: Record, metric: str) -> float | None:
    """The last value of a sound trial, if it can be drawn."""
    value: float = record["metrics"].get(metric, math.nan)
    return value if is_sound(record) and abs(value) <= LARGEST else None


def curves(query: Query, sweep: str, metric: str, drawn: Sequence[Record], shading: Shades) -> dict[int, Curve]:
    """By trial; those that never reported the metric have none. Thinned so that every spike stays."""
    bins = max(20, MAX_CURVE_POINTS // (2 * max(1, len(drawn))))
    trials = [record["trial"] for record in drawn]
    wanted = {"largest": LARGEST, "bins": bins, "sweep": sweep, "metric": metric, "trials": trials}
    _, rows = query(POINTS, wanted)
    points = {trial: list(own) for trial, own in itertools.groupby(rows, key=lambda row: row[0])}
    return {
        record["trial"]: Curve(
            shading.of[record["trial"]],
            _pieces(points.get(record["trial"], [])),
            record["diverged_at"] if is_diverged(record) else None,
            is_sound(record),
        )
        for record in drawn
        if record["trial"] in points
    }


def _pieces(rows: Iterable[Sequence[Any]]) -> list[list[tuple[int, float]]]:
    """(trial, step, value) in pieces of values that can be drawn."""
    runs = itertools.groupby(rows, key=lambda row: abs(row[2]) <= LARGEST)
    return [[(step, value) for _, step, value in run] for is_drawn, run in runs if is_drawn]


def best_cells(cells: Sequence[Cell], metric: str, mode: str) -> list[Cell]:
    """All, or those with the best means; in their order."""
    if len(cells) <= MAX_ROWS:
        return list(cells)
    sign = 1 if mode == "min" else -1
    means = [_mean(members, metric) for _, members in cells]
    ranked = sorted(range(len(cells)), key=lambda place: math.inf if (mean := means[place]) is None else sign * mean)
    return [cells[place] for place in sorted(ranked[:MAX_ROWS])]


def rows(cells: Sequence[Cell], metric: str, shading: Shades) -> list[Row]:
    """The last values of each cell's trials that are sound, as the comparison has them."""
    lines = []
    for values, members in cells:
        numbers = sorted(finite(_value(record, metric) for record in members))
        dots, mean = _spread(numbers, MAX_ROW_DOTS), _mean(members, metric)
        lines.append(Row(_row_name(values), shading.shared(members), dots, mean, _missing(members, metric)))
    return lines


def _mean(members: Sequence[Record], metric: str) -> float | None:
    return mean_and_spread(_value(record, metric) for record in members)[0]


def _missing(members: Sequence[Record], metric: str) -> str:
    """Of how many the mean is, and why: `2 of 4: 1 diverged, 1 failed`; empty where every trial has its value."""
    without = [one for one in members if _value(one, metric) is None]
    reasons = Counter("without a number" if is_sound(one) else one["state"] for one in without)
    num_valued = len(members) - len(without)
    mean_of = f"{num_valued} of {len(members)}: " if without and num_valued else ""
    return mean_of + ", ".join(f"{num} {reason}" for reason, num in reasons.most_common())


def shares(cells: Sequence[Cell], shading: Shades, has_rule: bool) -> list[Share]:
    """How many of each cell's results diverged, or are unstable where the sweep says what that is."""
    lines = []
    for values, members in cells:
        count, n = unstable_of(members) if has_rule else diverged_of(members)
        interval = wilson(count, n)
        if interval:
            lines.append(Share(_row_name(values), shading.shared(members), count, n, *interval))
    return lines


def relation(
    records: Sequence[Record], axis: str, metric: str, mode: str, is_grid: bool, shading: Shades
) -> Relation | None:
    """The metric over an axis; None where the axis has too few values to show a course, or too many words."""
    having = [record for record in records if axis in record["params"]]
    values = _distinct(record["params"][axis] for record in having)
    numeric = all(map(_is_place, values.values()))
    if len(values) < 3 or not (numeric or len(values) <= MAX_WORDS):
        return None
    place_of = {key: float(value) if numeric else float(place) for place, (key, value) in enumerate(values.items())}

    def place(record: Record) -> float:
        return place_of[canonical_json(record["params"][axis])]

    valued = [one for one in having if _value(one, metric) is not None]
    ranked = _spread(sorted(valued, key=lambda one: badness(one, metric, mode)), MAX_DOTS)
    diverged = _spread(sorted(filter(is_diverged, having), key=place), MAX_DOTS // 4)
    return Relation(
        [(place(one), one["metrics"][metric], shading.of[one["trial"]]) for one in ranked],
        _lines(having, axis, metric, shading, place) if is_grid else [],
        [(place(one), shading.of[one["trial"]]) for one in diverged],
        [] if numeric else [short(value) for value in values.values()],
    )


def _lines(
    records: Sequence[Record], axis: str, metric: str, shading: Shades, place: Any
) -> list[tuple[str, list[tuple[float, float]]]]:
    """One a setting of everything else, through the means over its seeds; of many, some.

    Broken where a seed has no value: a mean over the others falls where they are the ones that survive.
    """
    lines = []
    for members in alike(records, (axis, "seed")):
        pieces = [piece for piece in _whole_means(members, metric, place) if len(piece) > 1]
        if pieces:
            lines.append((shading.shared(members), pieces))
    return [(colour, piece) for colour, pieces in _spread(lines, MAX_LINES) for piece in pieces]


def _whole_means(members: Sequence[Record], metric: str, place: Any) -> list[list[tuple[float, float]]]:
    """(place, mean) in pieces of places at which every seed of the members has a value."""
    num_seeds = len(_distinct(one["params"].get("seed") for one in members))
    heights: dict[float, list[float]] = {}
    for one in members:
        value = _value(one, metric)
        heights.setdefault(place(one), []).extend([] if value is None else [value])
    runs = itertools.groupby(sorted(heights.items()), key=lambda item: len(item[1]) == num_seeds)
    return [[(at, sum(own) / num_seeds) for at, own in run] for is_whole, run in runs if is_whole]


def named_values(axes: Sequence[str], values: Sequence[Any]) -> str:
    """`k=1, precision=fp32`."""
    return ", ".join(f"{axis}={_word(value)}" for axis, value in zip(axes, values, strict=True))


def _row_name(values: Sequence[Any]) -> str:
    """Of each value as much as a line has room for: any of them may be what tells two rows apart."""
    words = list(map(short, values))
    room = LABEL_LENGTH - len(BETWEEN) * (len(words) - 1)
    fits = (most for most in range(room, MIN_NAME, -1) if sum(min(len(word), most) for word in words) <= room)
    longest = next(fits, MIN_NAME)
    return BETWEEN.join(label(word, longest) for word in words)


def _word(value: Any) -> str:
    return label(short(value), MAX_NAME)


def _is_place(value: Any) -> bool:
    """True for what has a place on an axis of numbers."""
    return is_number(value) and abs(value) <= LARGEST


def _distinct(values: Iterable[Any]) -> dict[str, Any]:
    return {canonical_json(value): value for value in values}


def _spread(items: Sequence[Item], limit: int) -> list[Item]:
    """At most `limit` of them, evenly spread, the first and the last among them; of one alone, the middle."""
    if len(items) <= limit:
        return list(items)
    if limit == 1:
        return [items[len(items) // 2]]
    return [items[round(place * (len(items) - 1) / (limit - 1))] for place in range(limit)]
