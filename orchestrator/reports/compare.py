"""Answers a sweep's question: per cell mean, spread, diverged and unstable share, cost; per axis its effect."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from orchestrator.errors import OrchError
from orchestrator.reports.cells import Cell, Record, alike, cells_of, diverged_of, is_result, is_sound, unstable_of
from orchestrator.reports.source import (
    Query,
    SweepFacts,
    check_metrics,
    nearest,
    sweep_facts,
    trial_records,
    unstable_in_words,
)
from orchestrator.reports.statistics import finite, geometric_mean_ratio, mean_and_spread, wilson
from orchestrator.reports.table import Table, short
from orchestrator.trial import TrialState, canonical_json


def compare(query: Query, sweeps: Sequence[str], by: Sequence[str] | None, metrics: Sequence[str] | None) -> Table:
    """One row a cell. `by` defaults to the grid axes without seed, `metrics` to the sweep's own and its `show:` list.

    Diverged trials count in n and in the diverged share, never in a mean. The unstable share has columns where a sweep
    says what it calls unstable; trials of which that is unknown do not count in it. Suspect trials are in the means,
    as a sweep of bugs wants it; where there are any, a column counts them.
    """
    facts = [sweep_facts(query, name) for name in sweeps]
    if metrics:
        check_metrics(query, sweeps, metrics)
    wanted = list(dict.fromkeys(metrics or [name for one in facts for name in one.shown]))
    axes = list(dict.fromkeys(by or [axis for one in facts for axis in one.cell_axes]))
    suspects = {one.name: _suspects(query, one.name) for one in facts}
    cells = _cells(query, facts, axes, wanted, suspects, checked=bool(by))
    rules = {one.name: unstable_in_words(one.unstable) for one in facts if one.unstable}
    has_suspects = any(suspects.values())
    first = 0 if len(facts) > 1 else 1  # the only sweep need not be named
    rows = [[*label[first:], *_cell_row(records, wanted, bool(rules), has_suspects)] for label, records in cells]
    notes = [
        *_notes(cells, suspects),
        *_unjudged(cells, facts),
        *(rule if len(facts) == 1 else f"{name}: {rule}" for name, rule in rules.items()),
    ]
    columns = [*["sweep", *axes][first:], *_columns(wanted, bool(rules), has_suspects)]
    return Table(columns, rows, title=facts[0].question if len(facts) == 1 else "", notes=notes)


def _cells(
    query: Query,
    facts: Sequence[SweepFacts],
    axes: Sequence[str],
    metrics: Sequence[str],
    suspects: Mapping[str, Collection[int]],
    checked: bool,
) -> list[Cell]:
    """The sweeps' trials by sweep, which comes first, and axes; `checked`: every one of them must have all axes."""
    cells: list[Cell] = []
    for one in facts:
        records = trial_records(query, one.name, metrics)
        for record in records:
            if checked:
                _check_axes(axes, record, one)
            record["suspect"] = record["trial"] in suspects[one.name]
        cells += [([one.name, *values], members) for values, members in cells_of(records, axes)]
    return cells


def _columns(metrics: Sequence[str], with_unstable: bool, with_suspect: bool) -> list[str]:
    """Those that `_cell_row` fills."""
    return [
        "n",
        *(name for metric in metrics for name in (metric, f"{metric} ±")),
        *("diverged", "95 %"),
        *(("unstable", "unstable 95 %") if with_unstable else ()),
        *(("suspect",) if with_suspect else ()),
        "seconds",
    ]


def _check_axes(axes: Sequence[str], record: Record, facts: SweepFacts) -> None:
    missing = [axis for axis in axes if axis not in record["config"]]
    if missing:
        hint = nearest(missing[0], facts.axes or list(record["config"]))
        raise OrchError(f"--by  {missing[0]!r} is not a parameter of sweep {facts.name}; {hint}")


def _suspects(query: Query, sweep: str) -> set[int]:
    """The trials that do not measure what they claim: a check found an error in them."""
    _, rows = query("select trial from orch.runs where sweep = %s and verdict = 'suspect'", (sweep,))
    return {trial for (trial,) in rows}


def _cell_row(records: Sequence[Record], metrics: Sequence[str], with_unstable: bool, with_suspect: bool) -> list[Any]:
    results = list(filter(is_result, records))
    sound = list(filter(is_sound, records))
    cost = finite(record["seconds"] for record in results)
    row: list[Any] = [len(results)]
    for metric in metrics:
        row.extend(mean_and_spread(record["metrics"].get(metric) for record in sound))
    row.extend(_share(*diverged_of(records)))
    if with_unstable:
        row.extend(_share(*unstable_of(records)))
    if with_suspect:
        row.append(sum(record["suspect"] for record in results))
    row.append(sum(cost) / len(cost) if cost else None)
    return row


def _share(count: int, n: int) -> tuple[str, str | None]:
    """`1/3` and its 95 % interval."""
    interval = wilson(count, n)
    return f"{count}/{n}", f"{interval[0]:.2f}-{interval[1]:.2f}" if interval else None


def _notes(cells: Sequence[Cell], suspects: Mapping[str, Collection[int]]) -> list[str]:
    records = [record for _, members in cells for record in members]
    without = sum(not is_result(record) for record in records)
    stopped = sum(record["state"] == TrialState.STOPPED for record in records)
    notes = []
    if without:
        notes.append(f"{without} of {len(records)} trials have no result yet or failed; they are not counted.")
    if stopped:
        notes.append(f"{stopped} of {len(records)} trials were stopped early; they count with what they had then.")
    why = "suspect trials count in the means, though a check found an error in them: orch health"
    return [*notes, *(f"{why} {sweep}" for sweep, some in suspects.items() if some)]


def _unjudged(cells: Sequence[Cell], facts: Sequence[SweepFacts]) -> list[str]:
    """Says how many results the rule of `unstable` could not judge: an axis may decide which metrics there are."""
    notes = []
    for one in facts:
        members = [record for label, records in cells for record in records if label[0] == one.name]
        sound = list(filter(is_sound, members))
        num = sum(record["unstable"] is None for record in sound)
        if one.unstable and num:
            rule = one.unstable
            against = ", or what they are held against has no finite one above 0" if rule["relative_to"] else ""
            why = f"they never reported {rule['metric']}{against}"
            notes.append(f"{num} of {len(sound)} results of {one.name} are neither stable nor unstable: {why}.")
    return notes


def effects(query: Query, sweep: str, metrics: Sequence[str] | None = None) -> Table:
    """Per grid axis, each value against the axis' first one: the ratio of every metric over paired trials.

    A pair agrees in all other parameters, the seed included; for a ratio both trials need a finite, positive value.
    Without such a pair, as where all diverged, the shares alone answer; without two results there is no row. Shares
    count the results among the trials that have a partner. Axes that move together are one.
    """
    facts = sweep_facts(query, sweep)
    wanted = list(dict.fromkeys(metrics or facts.shown))
    records = trial_records(query, sweep, wanted)
    rows = [
        row
        for axes in _moving(facts)
        for row in _axis_rows(axes, [one for one in records if axes[0] in one["params"]], wanted, bool(facts.unstable))
    ]
    columns = ["axis", "change", "pairs", *wanted, "diverged", *(("unstable",) if facts.unstable else ())]
    return Table(columns, rows, title="What each axis changes, all else equal")


def _moving(facts: SweepFacts) -> list[tuple[str, ...]]:
    """The grid axes, those of a zip together, each once, in the order of the file."""
    groups = [
        next(
            (tuple(axis for axis in facts.cell_axes if axis in group) for group in facts.zipped if one in group), (one,)
        )
        for one in facts.cell_axes
    ]
    return list(dict.fromkeys(groups))


def _axis_rows(
    axes: Sequence[str], records: Sequence[Record], metrics: Sequence[str], with_unstable: bool
) -> list[list[Any]]:
    values: dict[str, str] = {}
    for one in records:
        values.setdefault(_at(one, axes), ", ".join(short(one["params"][axis]) for axis in axes))
    by_value = [{_at(one, axes): one for one in members} for members in alike(records, axes)]
    if len(values) < 2:
        return []
    base, *others = values
    rows = []
    for other in others:
        pairs = [(some[base], some[other]) for some in by_value if base in some and other in some]
        if not any(all(map(is_result, pair)) for pair in pairs):
            continue
        sound = [pair for pair in pairs if all(map(is_sound, pair))]
        ratios = [_ratio(sound, metric) for metric in metrics]
        sides = [[pair[side] for pair in pairs] for side in (0, 1)]
        counts = (diverged_of, unstable_of) if with_unstable else (diverged_of,)
        shares = [" -> ".join("{}/{}".format(*count(side)) for side in sides) for count in counts]
        rows.append([", ".join(axes), f"{values[base]} -> {values[other]}", len(sound), *ratios, *shares])
    return rows


def _at(record: Record, axes: Sequence[str]) -> str:
    return canonical_json([record["params"][axis] for axis in axes])


def _ratio(pairs: Sequence[tuple[Record, Record]], metric: str) -> str | None:
    values = [(left["metrics"].get(metric), right["metrics"].get(metric)) for left, right in pairs]
    numbers = [(a, b) for a, b in values if a is not None and b is not None and math.isfinite(a) and math.isfinite(b)]
    ratio = geometric_mean_ratio(numbers)
    return None if ratio is None else f"x {ratio:.3g}"
