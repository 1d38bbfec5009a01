"""The figures of a page, one section a metric: what each shows, its caption, and in words what it leaves out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.reports.cells import Cell, Record, cells_of
from orchestrator.reports.page import drawing, selection
from orchestrator.reports.page.selection import Shades
from orchestrator.reports.source import Query, SweepFacts, trial_records
from orchestrator.reports.table import counted, short

MAX_METRICS = 4  # that have figures
MAX_RELATIONS = 4  # axes that have a figure, of a metric


@dataclass(frozen=True)
class Figure:
    svg: str
    caption: str
    shades: Shades | None = None  # its own, where they are not its section's


@dataclass(frozen=True)
class Section:
    """The figures of one metric, or of stability."""

    title: str
    shades: Shades | None  # where there is something to shade
    figures: Sequence[Figure]
    notes: Sequence[str]


@dataclass(frozen=True)
class Chart:
    """What all figures of a page share."""

    facts: SweepFacts
    records: Sequence[Record]
    cells: Sequence[Cell]
    drawn: Sequence[Record]  # as curves
    axes: Sequence[str]  # that make a cell
    shading: Shades
    objective: str
    mode: str  # of the objective


def chart_of(query: Query, facts: SweepFacts, axes: Sequence[str], metrics: Sequence[str]) -> Chart:
    records = trial_records(query, facts.name, metrics)
    sampled = [axis for axis in facts.axes if axis not in axes and axis != "seed"]
    cells = cells_of(records, axes)
    begun = [[one for one in members if one["run_id"]] for _, members in cells]
    mode = facts.mode_of(metrics[0])
    drawn = selection.chosen([one for one in begun if one], metrics[0], mode, selection.MAX_CURVES)
    shading = selection.shades(records, [*axes, *sampled])
    return Chart(facts, records, cells, drawn, axes, shading, metrics[0], mode)


def sections_of(query: Query, chart: Chart, metrics: Sequence[str]) -> Iterator[Section]:
    """One a metric, the names of those without, then stability."""
    num_drawn = 0
    empty, further = [], []
    for metric in metrics:
        if num_drawn == MAX_METRICS:
            further.append(metric)
        elif section := _section_of(query, chart, metric):
            num_drawn += 1
            yield section
        else:
            empty.append(metric)
    notes = [f"beyond the first {MAX_METRICS}: {', '.join(further)}"] if further else []
    notes += [f"nothing that a figure could show: {', '.join(empty)}"] if empty else []
    if notes:
        yield _section(chart, "Metrics without figures", [], notes)
    if stable := _stability(chart):
        yield _section(chart, "Stability", stable, [])


def _section_of(query: Query, chart: Chart, metric: str) -> Section | None:
    """None for a metric whose figures would say nothing."""
    courses, notes = _curves(query, chart, metric)
    relations = _relations(chart, metric)
    is_told = len(chart.axes) == 1 and any(axis == chart.axes[0] for axis, _ in relations)
    drawings = [*courses, *([] if is_told else _rows(chart, metric)), *(figure for _, figure in relations)]
    return _section(chart, metric, drawings, notes) if drawings else None


def _section(chart: Chart, title: str, drawings: Sequence[Figure], notes: Sequence[str]) -> Section:
    return Section(title, chart.shading if drawings else None, drawings, notes)


def _curves(query: Query, chart: Chart, metric: str) -> tuple[list[Figure], list[str]]:
    """A panel for each combination of the axes that no colour tells; none where nothing has a course."""
    found = selection.curves(query, chart.facts.name, metric, chart.drawn, chart.shading)
    frame = drawing.frame_of(list(found.values()))
    if frame is None or all(sum(map(len, one.pieces)) < 2 for one in found.values()):
        return [], []
    named, pooled = selection.panels(chart.drawn, chart.axes, chart.shading.axis)
    drawings = []
    for name, members in named:
        own = [found[one["trial"]] for one in members if one["trial"] in found]
        if own:
            caption = f"by step, {name}" if name else "by step"
            drawings.append(Figure(drawing.curves_svg(own, frame, f"{metric} {caption}"), caption))
    return drawings, _about_curves(chart, found, frame, pooled)


def _about_curves(
    chart: Chart, found: Mapping[int, drawing.Curve], frame: drawing.Frame, pooled: Sequence[str]
) -> list[str]:
    notes = []
    if any(one.diverged_at is not None for one in found.values()):
        notes.append("× on the upper edge: a run diverged at that step; its curve ends at its last finite value")
    without = [trial for trial, one in found.items() if not one.pieces]
    if without:
        notes.append(f"{counted(len(without), 'trial')} never had a finite value")
    if frame.beyond is not None:
        notes.append(f"values of runs that blew up leave the figure; the farthest was {short(frame.beyond)}")
    if pooled:
        notes.append(f"panels hold all values of {', '.join(pooled)}")
    num_begun = sum(bool(one["run_id"]) for one in chart.records)
    if len(chart.drawn) < num_begun:
        notes.append(f"{len(chart.drawn)} of {num_begun} curves are drawn, {_choice(chart)}")
    return notes


def _choice(chart: Chart) -> str:
    """How the curves were chosen."""
    num_drawn, num_cells = len(chart.drawn), len(chart.cells)
    if num_drawn < num_cells:
        return f"the median one of {num_drawn} of the {num_cells} cells"
    if num_drawn == num_cells:
        return "the median one of each cell"
    return ("of each cell " if num_cells > 1 else "") + "evenly from the best last value to the worst"


def _rows(chart: Chart, metric: str) -> list[Figure]:
    """The last values by cell; nothing for a single cell."""
    if len(chart.cells) < 2:
        return []
    cells = selection.best_cells(chart.cells, chart.objective, chart.mode)
    rows = selection.rows(cells, metric, chart.shading)
    if not any(row.values for row in rows):
        return []
    most = selection.MAX_ROW_DOTS
    some = f", at most {most} dots a line" if any(len(members) > most for _, members in cells) else ""
    beside = ", of as many of the cell's trials as stand beside it" if any(row.note for row in rows) else ""
    caption = f"last value by {_cell_name(chart, len(rows))}; bar: the mean{beside}{some}"
    return [Figure(drawing.rows_svg(rows, f"{metric} {caption}"), caption)]


def _cell_name(chart: Chart, num_rows: int) -> str:
    best_of = f", the best {num_rows} of {len(chart.cells)} cells" if num_rows < len(chart.cells) else ""
    return " · ".join(chart.axes) + best_of


def _relations(chart: Chart, metric: str) -> list[tuple[str, Figure]]:
    """By axis, how the metric moves with it."""
    drawings: list[tuple[str, Figure]] = []
    for axis in chart.facts.axes:
        figure = _relation(chart, metric, axis) if axis != "seed" and len(drawings) < MAX_RELATIONS else None
        drawings += [(axis, figure)] if figure else []
    return drawings


def _relation(chart: Chart, metric: str, axis: str) -> Figure | None:
    """In the section's colours; over their own axis, which needs none, in those of the next one."""
    is_own = axis == chart.shading.axis
    shading = selection.shades(chart.records, [one for one in chart.axes if one != axis]) if is_own else chart.shading
    is_grid = axis in chart.facts.cell_axes
    relation = selection.relation(chart.records, axis, metric, chart.mode, is_grid, shading)
    if relation is None or not relation.points:
        return None
    lines = "; lines: all else equal, mean over seeds, broken where a seed has no value" if relation.lines else ""
    crosses = "; ×: diverged" if relation.diverged else ""
    some = f"; at most {selection.MAX_DOTS} dots" if len(chart.records) > selection.MAX_DOTS else ""
    caption = f"last value over {axis}{lines}{crosses}{some}"
    svg = drawing.relation_svg(relation, axis, f"{metric} {caption}")
    return Figure(svg, caption, shading if is_own else None)


def _stability(chart: Chart) -> list[Figure]:
    """Shares by cell, where there are cells and not all are stable."""
    rule = chart.facts.unstable
    cells = selection.best_cells(chart.cells, chart.objective, chart.mode)
    shares = selection.shares(cells, chart.shading, rule is not None)
    if len(shares) < 2 or not any(share.count for share in shares):
        return []
    what = "unstable (diverged ones included)" if rule else "diverged"
    caption = f"share of results that are {what}, with its 95 % interval, by {_cell_name(chart, len(cells))}"
    return [Figure(drawing.shares_svg(shares, caption), caption)]
