"""What a report's figures show of many trials, and that nothing in them is more than a drawing."""

from __future__ import annotations

import math
import random
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator.reports.cells import cells_of
from orchestrator.reports.page import drawing, selection
from orchestrator.reports.page.drawing import (
    LABEL_LENGTH,
    Curve,
    Row,
    Share,
    curves_svg,
    frame_of,
    relation_svg,
    rows_svg,
    shares_svg,
)
from orchestrator.reports.page.selection import chosen, panels, relation, shades

HOSTILE = r"$\frac{1}{0}$ </text></svg><script>alert(1)</script> ]]> {{7*7}} \x01 " + "\x01\ufffe\u202e"


def trial(number: int, value: float, state: str = "finished", **params: Any) -> dict[str, Any]:
    metrics = {} if state == "waiting" else {"loss": value}
    made = {"trial": number, "state": state, "metrics": metrics, "params": params, "config": params, "unstable": False}
    return {**made, "diverged_at": 5 if state == "diverged" else None, "run_id": f"r{number}"}


def curve(*values: float, is_sound: bool = True, diverged_at: int | None = None) -> Curve:
    return Curve("s0", [list(enumerate(values))], diverged_at, is_sound)


def test_a_choice_of_trials_holds_the_best_and_the_worst_of_every_cell_and_ranks_the_diverged_last() -> None:
    rng = random.Random(0)
    cells = [[trial(100 * cell + number, rng.random()) for number in range(100)] for cell in range(4)]
    cells[2][7] = trial(207, -1.0, "diverged")  # its last value is the lowest of all
    drawn = chosen(cells, "loss", "min", 20)
    assert len(drawn) == 20
    for cell in (cells[0], cells[1], cells[3]):
        values = sorted(one["metrics"]["loss"] for one in cell)
        own = [one["metrics"]["loss"] for one in drawn if one in cell]
        assert (own[0], own[-1], len(own)) == (values[0], values[-1], 5)
    assert [one["trial"] for one in drawn if one in cells[2]][-1] == 207
    assert len(chosen([[one] for cell in cells for one in cell], "loss", "min", 30)) == 30  # more cells than lines


def test_few_trials_are_all_drawn() -> None:
    cells = [[trial(0, 1.0)], [trial(1, math.nan, "diverged")]]
    assert chosen(cells, "loss", "min", 2) == [trial(0, 1.0), cells[1][0]]


def test_what_a_run_that_blew_up_reached_does_not_flatten_the_others() -> None:
    frame = frame_of([curve(4.0, 1.0), curve(4.0, 9.0, 1e30, is_sound=False, diverged_at=3)])
    assert frame is not None
    assert (frame.low, frame.high, frame.beyond, frame.last_step) == (1.0, 9.0, 1e30, 3)
    assert frame.scale == {"value": "linear"}
    spike = frame_of([curve(4.0, 500.0, 1.0)])  # of a sound run: it belongs to the picture
    assert spike is not None
    assert (spike.high, spike.beyond, spike.scale["value"]) == (500.0, None, "log")
    assert frame_of([Curve("s0", [], 3, False)]) is None


def test_a_diverged_run_is_a_mark_over_the_axis_and_never_a_number() -> None:
    records = [trial(number, 1.0, lr=10.0**number) for number in range(3)]
    records.append(trial(3, 1e9, "diverged", lr=1000.0))
    drawn = relation(records, "lr", "loss", "min", True, shades(records, ["lr"]))
    assert drawn is not None
    assert [place for place, _, _ in drawn.points] == [1.0, 10.0, 100.0]
    assert [place for place, _ in drawn.diverged] == [1000.0]
    assert all(value == 1.0 for _, line in drawn.lines for _, value in line)


def test_a_line_over_an_axis_joins_trials_that_are_equal_but_for_it_and_averages_their_seeds() -> None:
    records = [
        trial(10 * k + 3 * place + seed, 100.0 * k + place + seed, c_z=c_z, k=k, seed=seed)
        for k in (0, 1)
        for place, c_z in enumerate((0.0, 0.1, 0.2))
        for seed in (0, 2)
    ]
    drawn = relation(records, "c_z", "loss", "min", True, shades(records, ["k"]))
    assert drawn is not None
    assert [line for _, line in drawn.lines] == [
        [(0.0, 1.0), (0.1, 2.0), (0.2, 3.0)],
        [(0.0, 101.0), (0.1, 102.0), (0.2, 103.0)],
    ]
    assert len({colour for colour, _ in drawn.lines}) == 2


def test_a_line_breaks_where_a_seed_diverged_instead_of_falling_to_the_mean_of_the_survivors() -> None:
    records = [
        trial(2 * place + seed, 1.0 + lr + seed, "diverged" if (lr, seed) in gone else "finished", lr=lr, seed=seed)
        for gone in [[(0.3, 0), (0.3, 1), (0.9, 1)]]
        for place, lr in enumerate((0.1, 0.2, 0.3, 0.4, 0.5, 0.9))
        for seed in (0, 1)
    ]
    drawn = relation(records, "lr", "loss", "min", True, shades(records, []))
    assert drawn is not None
    places = [[place for place, _ in line] for _, line in drawn.lines]
    assert places == [[0.1, 0.2], [0.4, 0.5]]
    assert drawn.lines[1][1] == [(0.4, pytest.approx(1.9)), (0.5, pytest.approx(2.0))]


def test_a_mean_over_fewer_than_all_says_over_how_many() -> None:
    fates = ["finished", "finished", "diverged", "failed", "diverged"]
    members = [trial(number, 1.0 + number, fate) for number, fate in enumerate(fates)]
    whole, part, none = selection.rows(
        [([0], members[:2]), ([1], members), ([2], members[2:3])], "loss", shades(members, [])
    )
    assert (whole.mean, whole.note) == (1.5, "")
    assert (part.mean, part.note) == (1.5, "2 of 5: 2 diverged, 1 failed")
    assert (none.mean, none.note) == (None, "1 diverged")


def test_a_row_of_several_colours_has_none_of_them_nor_has_what_no_axis_shades() -> None:
    records = [trial(number, 1.0, "diverged", kind=number // 2, lr=(number % 2, 1)[number // 2]) for number in range(4)]
    cells, shading = cells_of(records, ["kind"]), shades(records, ["lr"])
    assert [row.colour for row in selection.rows(cells, "loss", shading)] == ["ink", shading.of[1]]
    assert [share.colour for share in selection.shares(cells, shading, False)] == ["ink", shading.of[1]]
    assert set(shades(records, []).of.values()) == {"ink"}  # a colour of the legend would mean one of its values


def test_rows_keep_in_their_names_what_tells_them_apart() -> None:
    long = "transformer-with-moe-and-residual-"
    values = [[f"{long}a", 0.1], [f"{long}a", 0.2], [f"{long}b", 0.2]]
    rows = selection.rows([(own, [trial(0, 1.0)]) for own in values], "loss", shades([trial(0, 1.0)], []))
    names = [row.label for row in rows]
    assert len(set(names)) == 3
    assert all(len(name) <= LABEL_LENGTH for name in names)
    drawn = rows_svg(rows, "rows")
    assert all(name in drawn for name in names)


def test_axes_that_no_colour_tells_make_panels_while_these_are_few() -> None:
    records = [trial(n, 1.0, c_z=n % 2, k=n % 3, lr=n) for n in range(12)]
    named, pooled = panels(records, ["c_z", "k", "lr"], "c_z")
    assert [name for name, _ in named] == ["k=0", "k=1", "k=2"]
    assert pooled == ["lr"]


def test_numbers_shade_from_dark_to_bright_and_words_have_colours_of_their_own() -> None:
    records = [trial(n, 1.0, lr=value, kind=word) for n, (value, word) in enumerate([(0.1, "b"), (0.01, "a")])]
    assert shades(records, ["lr"]).legend == [("s0", "0.01"), ("s7", "0.1")]
    assert shades(records, ["kind"]).legend == [("c0", "b"), ("c1", "a")]
    many = [trial(n, 1.0, lr=float(n)) for n in range(100)]
    assert [words for _, words in shades(many, ["lr"]).legend] == [
        "0 to 19",
        "20 to 39",
        "40 to 59",
        "60 to 79",
        "80 to 99",
    ]
    assert shades([trial(0, 1.0, lr=1)], ["lr"]).axis is None


def drawings(text: str) -> Iterator[str]:
    """One of each kind, with the text wherever a text goes."""
    curves = [curve(1.0, 2.0), curve(3.0, is_sound=False, diverged_at=1)]
    frame = frame_of(curves)
    assert frame is not None
    yield curves_svg(curves, frame, f"{text} by step")
    yield rows_svg([Row(text, "c0", [1.0, 2.0], 1.5, text), Row(f"2{text}", "c1", [], None, "")], f"{text} by cell")
    yield shares_svg([Share(text, "s1", 1, 3, 0.06, 0.79)], f"{text} shares")
    words = [trial(n, float(n), axis=f"{text}{n}") for n in range(3)]
    course = relation(words, "axis", "loss", "min", True, shades(words, []))
    assert course is not None
    yield relation_svg(course, text, f"{text} course")


def test_a_drawing_is_the_same_each_time_shares_no_name_with_others_and_takes_its_colours_from_the_page() -> None:
    once = list(drawings("one"))
    assert next(drawings("one")) == once[0]
    names = [set(re.findall(r'id="([^"]+)"', svg)) for svg in (*once, next(drawings("two")))]
    assert sum(map(len, names)) == len(set().union(*names)) > 0
    for svg in once:
        assert set(re.findall(r"(?:fill|stroke): ([^;\"]+)", svg)) <= {
            "none",
            *(f"var(--{name})" for name in ("ink", "faint", "s0", "s1", "s2", "c0", "c1")),
        }
        assert not re.search(r"<style|https?:|font-family|xmlns|<\?xml|<!DOCTYPE", svg)


def test_texts_in_a_drawing_are_neither_mathematics_nor_markup() -> None:
    for svg in drawings(HOSTILE):
        assert r"$\frac{1}{0}$" in svg
        assert "&lt;/text" in svg
        assert "<script" not in svg
        assert svg.count("</svg>") == 1
        assert not re.search("[\x00-\x08\ufffe]", svg)


@pytest.mark.parametrize(
    "values", [[0.0], [1e-150, 1e150], [-1e150, 0.0, 1.0], [5e-324, 1e150], [0.1, math.nextafter(0.1, 1)]]
)
def test_every_value_that_counts_has_a_place(values: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, original = [], drawing.svg

    def kept(draw: Any, height: float, about: str) -> str:
        return original(lambda axes: (draw(axes), drawn.append(axes)), height, about)

    monkeypatch.setattr(drawing, "svg", kept)
    curves = [curve(*values)]
    frame = frame_of(curves)
    assert frame is not None
    records = [trial(n, value, x=value) for n, value in enumerate((*values, 2.0, 3.0))]
    course = relation(records, "x", "loss", "min", True, shades(records, ["x"]))
    assert course is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        curves_svg(curves, frame, "curves")
        relation_svg(course, "x", "course")
    assert places(drawn[0]).keys() == set(values)
    assert places(drawn[1]).keys() == {*values, 2.0, 3.0}
    for share in (one for axes in drawn for one in places(axes).values()):
        assert all(-1e-9 <= side <= 1 + 1e-9 for side in share)  # its lowest step lies on the edge, but for rounding


def places(axes: Any) -> dict[float, tuple[float, float]]:
    """By value: where it lies between the two ends of each axis, as shares."""
    points = [point for line in axes.lines for point in line.get_xydata()]
    pixels = axes.transData.transform(points)
    shares = axes.transAxes.inverted().transform(pixels)
    return {float(value): tuple(share) for (_, value), share in zip(points, shares, strict=True)}


def test_a_value_that_no_axis_can_hold_counts_as_none() -> None:
    records = [trial(0, 1.7e308, x=1), trial(1, 1.0, x=2), trial(2, 2.0, x=10**400)]
    [row] = selection.rows([([1], records)], "loss", shades(records, []))
    assert (row.values, row.mean, row.note) == ([1.0, 2.0], 1.5, "2 of 3: 1 without a number")
    assert shades(records, ["x"]).legend[0] == ("c0", "1")  # words, not places on a line
