"""Draws a report's figures. Takes plain finite values, reads nothing, and never draws what is no number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from orchestrator.reports.page.svg import HEX, label, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEIGHT = 3.1  # inches
ROW_HEIGHT = 0.27
LABEL_LENGTH = 30  # characters of a row's name, and of its note
SMALLEST = 1e-150  # below it a value is as good as 0
DECADES = 100.0  # a metric spans decades: its largest value over its smallest


@dataclass(frozen=True)
class Curve:
    """One trial over its steps, in pieces: it breaks where a value is not finite."""

    colour: str
    pieces: Sequence[Sequence[tuple[int, float]]]  # (step, value), finite
    diverged_at: int | None  # step
    is_sound: bool


@dataclass(frozen=True)
class Row:
    """One line of a figure that has a line a cell."""

    label: str
    colour: str
    values: Sequence[float]  # finite
    mean: float | None
    note: str  # what no dot can say, such as `2 of 3: 1 diverged`


@dataclass(frozen=True)
class Share:
    """How many of n, with its interval, within 0..1."""

    label: str
    colour: str
    count: int
    n: int
    low: float
    high: float


@dataclass(frozen=True)
class Relation:
    """A metric over the values of one axis: points of trials, lines of all else equal, where runs diverged."""

    points: Sequence[tuple[float, float, str]]  # place on the axis, value, colour
    lines: Sequence[tuple[str, Sequence[tuple[float, float]]]]  # colour, points; one that breaks is several
    diverged: Sequence[tuple[float, str]]  # place on the axis, colour
    words: Sequence[str]  # of an axis of words, at the places 0, 1, ...; empty for numbers


@dataclass(frozen=True)
class Frame:
    """What the panels of one metric have in common."""

    scale: dict[str, Any]
    low: float
    high: float
    first_step: int
    last_step: int
    beyond: float | None  # the largest value that lies outside, if any


def frame_of(curves: Sequence[Curve]) -> Frame | None:
    """Holds every value of the sound trials, and of the others what is within ten times that. None: no value at all."""
    every = [value for curve in curves for piece in curve.pieces for _, value in piece]
    if not every:
        return None
    sound = [value for curve in curves if curve.is_sound for piece in curve.pieces for _, value in piece] or every
    limit = 10 * max(map(abs, sound)) or math.inf
    inside = [value for value in every if abs(value) <= limit]
    outside = [value for value in every if abs(value) > limit]
    steps = [step for curve in curves for piece in curve.pieces for step, _ in piece]
    steps += [curve.diverged_at for curve in curves if curve.diverged_at is not None]
    beyond = max(outside, key=abs) if outside else None
    return Frame(metric_scale(inside), min(inside), max(inside), min(0, *steps), max(1, *steps), beyond)


def metric_scale(values: Sequence[float]) -> dict[str, Any]:
    """Arguments of `set_yscale`: logarithmic where positive values span decades, or where few lie far from the rest."""
    if min(values) >= SMALLEST:
        return {"value": "log" if max(values) / min(values) >= DECADES else "linear"}
    sizes = [abs(value) for value in values if abs(value) >= SMALLEST]
    if sizes and max(sizes) / median(sizes) >= DECADES:
        return {"value": "symlog", "linthresh": median(sizes)}
    return {"value": "linear"}


def axis_scale(values: Sequence[float]) -> dict[str, Any]:
    """As `metric_scale`, for what a sweep varies: a grid of powers is spread evenly, with a place of its own for 0."""
    positive = [value for value in values if value >= SMALLEST]
    if not positive or min(values) < 0 or max(positive) / min(positive) < 30:
        return {"value": "linear"}
    if len(positive) == len(values):
        return {"value": "log"}
    return {"value": "symlog", "linthresh": min(positive), "linscale": 1}


def curves_svg(curves: Sequence[Curve], frame: Frame, about: str) -> str:
    """Lines over steps; a cross on the upper edge where a run diverged, for that has no height."""

    def draw(axes: Axes) -> None:
        for curve in curves:
            for piece in curve.pieces:
                style: dict[str, Any] = {"marker": "."} if len(piece) == 1 else {"linewidth": 1.1}
                axes.plot(*zip(*piece, strict=True), color=HEX[curve.colour], alpha=0.75, **style)
            if curve.diverged_at is not None:
                _cross(axes, curve.diverged_at, curve.colour)
        _fit(axes.set_yscale, axes.set_ylim, frame.scale, frame.low, frame.high)
        axes.set_xlim(frame.first_step, frame.last_step * 1.02)
        axes.set_xlabel("step")

    return svg(draw, HEIGHT, about)


def rows_svg(rows: Sequence[Row], about: str) -> str:
    """A dot a trial and a bar at the mean, one line a cell."""
    every = [value for row in rows for value in row.values]

    def draw(axes: Axes) -> None:
        for place, row in enumerate(rows):
            axes.plot(row.values, [place] * len(row.values), "o", color=HEX[row.colour], alpha=0.65, markersize=4.5)
            if row.mean is not None:
                axes.plot([row.mean], [place], "|", color=HEX["ink"], markersize=12, markeredgewidth=1.8)
            _note(axes, place, row.note)
        if every:
            _fit(axes.set_xscale, axes.set_xlim, metric_scale(every), min(every), max(every))
        _name_rows(axes, [row.label for row in rows])

    return svg(draw, ROW_HEIGHT * len(rows) + 0.8, about)


def shares_svg(shares: Sequence[Share], about: str) -> str:
    """The share and its 95 % interval, one line a cell."""

    def draw(axes: Axes) -> None:
        for place, share in enumerate(shares):
            axes.plot([share.low, share.high], [place, place], color=HEX[share.colour], linewidth=2.5, alpha=0.6)
            axes.plot([share.count / share.n], [place], "o", color=HEX[share.colour], markersize=6)
            _note(axes, place, f"{share.count}/{share.n}")
        axes.set_xlim(-0.04, 1.04)
        axes.set_xticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
        _name_rows(axes, [share.label for share in shares])

    return svg(draw, ROW_HEIGHT * len(shares) + 0.6, about)


def relation_svg(relation: Relation, axis: str, about: str) -> str:
    """The metric over one axis; crosses on the upper edge where runs diverged."""
    heights = [value for _, value, _ in relation.points]
    places = [*(place for place, _, _ in relation.points), *(place for place, _ in relation.diverged)]

    def draw(axes: Axes) -> None:
        for colour, line in relation.lines:
            axes.plot(*zip(*line, strict=True), color=HEX[colour], alpha=0.75, linewidth=1.2)
        for colour in dict.fromkeys(colour for *_, colour in relation.points):
            mine = [point[:2] for point in relation.points if point[2] == colour]
            axes.plot(*zip(*mine, strict=True), "o", color=HEX[colour], alpha=0.6, markersize=4)
        for place, colour in relation.diverged:
            _cross(axes, place, colour)
        if heights:
            _fit(axes.set_yscale, axes.set_ylim, metric_scale(heights), min(heights), max(heights))
        if relation.words:
            words = [label(word, 12) for word in relation.words]
            axes.set_xticks(range(len(words)), words, rotation=30 if len(words) > 3 else 0)
            axes.set_xlim(-0.4, len(words) - 0.6)
        else:
            _fit(axes.set_xscale, axes.set_xlim, axis_scale(places), min(places), max(places))
        axes.set_xlabel(label(axis, 40))

    return svg(draw, HEIGHT, about)


def _cross(axes: Axes, place: float, colour: str) -> None:
    edge = axes.get_xaxis_transform()
    style: dict[str, Any] = {"markersize": 6, "markeredgewidth": 1.8, "clip_on": False, "zorder": 5}
    axes.plot([place], [1], "x", color=HEX[colour], transform=edge, **style)


def _note(axes: Axes, place: int, words: str) -> None:
    axes.text(1.02, place, label(words, LABEL_LENGTH), transform=axes.get_yaxis_transform(), va="center", fontsize=8)


def _name_rows(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), [label(one, LABEL_LENGTH) for one in labels], fontsize=9)
    axes.set_ylim(len(labels) - 0.5, -0.5)  # the first one on top
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)


def _fit(
    set_scale: Callable[..., None], set_limits: Callable[..., Any], scale: dict[str, Any], low: float, high: float
) -> None:
    """The scale, and limits with some air on both sides."""
    if scale["value"] == "log":
        air = max((high / low) ** 0.04, 1.05)
        set_limits(low / air, high * air)
    elif scale["value"] == "symlog":
        set_limits(low * (0.6 if low > 0 else 1.6) - scale["linthresh"] * 0.2, high * (1.6 if high > 0 else 0.6))
    else:
        air = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
        set_limits(low - air, high + air)
    set_scale(**scale)
