"""Answers a sweep's question: per cell mean, spread, diverged and unstable share, cost; per axis its effect."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from orchestrator.errors import OrchError
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

Record = Mapping[str, Any]


def compare(query: Query, sweeps: Sequence[str], by: Sequence[str] | None, metrics: Sequence[str] | None) -> Table:
    """One row a cell. `by` defaults to the grid axes without seed, `metrics` to the sweep's own and its `show:` list.

    Diverged trials count in n and in the diverged share, never in a mean. The unstable share has columns where a sweep
    says what it calls unstable; trials of which that is unknown do not count in it. Suspect trials are in the means,
    as a sweep of bugs wants it; where there are any, a column counts them.
    """
    facts = [sweep_facts(query, name) for name in sweeps]
    if metrics:
        check_metrics(query, sweeps, metrics)
    wanted = list(dict.fromkeys(metrics or [name for one in facts for name in (one.metric, *one.show)]))
    axes = list(dict.fromkeys(by or [axis for one in facts for axis in one.cell_axes]))
    cells: dict[str, tuple[list[Any], list[Record]]] = {}
    suspects = {one.name: _suspects(query, one.name) for one in facts}
    for one in facts:
        for record in trial_records(query, one.name, wanted):
            if by:
                _check_axes(axes, record, one)
            record["suspect"] = record["trial"] in suspects[one.name]
            label = [one.name, *(record["config"].get(axis) for axis in axes)]
            cells.setdefault(canonical_json(label), (label, []))[1].append(record)
    head = ["sweep", *axes] if len(facts) > 1 else list(axes)
    rules = {one.name: unstable_in_words(one.unstable) for one in facts if one.unstable}
    columns = [
        *head,
        "n",
        *(name for metric in wanted for name in (metric, f"{metric} ±")),
        *("diverged", "95 %"),
        *(("unstable", "unstable 95 %") if rules else ()),
        *(("suspect",) if any(suspects.values()) else ()),
        "seconds",
    ]
    rows = [
        [*(label if len(facts) > 1 else label[1:]), *_cell_row(records, wanted, bool(rules), any(suspects.values()))]
        for label, records in cells.values()
    ]
    notes = [
        *_notes(cells, suspects),
        *(rule if len(facts) == 1 else f"{name}: {rule}" for name, rule in rules.items()),
    ]
    return Table(columns, rows, title=facts[0].question if len(facts) == 1 else "", notes=notes)


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
    results = [record for record in records if TrialState(record["state"]).is_result]
    sound = [record for record in results if record["state"] != TrialState.DIVERGED]
    cost = finite(record["seconds"] for record in results)
    row: list[Any] = [len(results)]
    for metric in metrics:
        row.extend(mean_and_spread(record["metrics"].get(metric) for record in sound))
    row.extend(_share(len(results) - len(sound), len(results)))
    if with_unstable:
        known = [record["unstable"] for record in results if record["unstable"] is not None]
        row.extend(_share(sum(known), len(known)))
    if with_suspect:
        row.append(sum(record["suspect"] for record in results))
    row.append(sum(cost) / len(cost) if cost else None)
    return row


def _share(count: int, n: int) -> tuple[str, str | None]:
    """`1/3` and its 95 % interval."""
    interval = wilson(count, n)
    return f"{count}/{n}", f"{interval[0]:.2f}-{interval[1]:.2f}" if interval else None


def _notes(cells: Mapping[str, tuple[list[Any], list[Record]]], suspects: Mapping[str, Collection[int]]) -> list[str]:
    records = [record for _, members in cells.values() for record in members]
    without = sum(not TrialState(record["state"]).is_result for record in records)
    notes = [f"{without} of {len(records)} trials have no result yet or failed; they are not counted."]
    why = "suspect trials count in the means, though a check found an error in them: orch health"
    return [*(notes if without else []), *(f"{why} {sweep}" for sweep, some in suspects.items() if some)]


def effects(query: Query, sweep: str, metrics: Sequence[str] | None = None) -> Table:
    """Per grid axis, each value against the axis' first one: the ratio of every metric over paired trials.

    A pair agrees in all other parameters, the seed included; both trials must have a finite, positive value.
    """
    facts = sweep_facts(query, sweep)
    wanted = list(dict.fromkeys(metrics or (facts.metric, *facts.show)))
    records = trial_records(query, sweep, wanted)
    rows = [
        row
        for axis in facts.cell_axes
        for row in _axis_rows(axis, [one for one in records if axis in one["params"]], wanted)
    ]
    rows = [row for row in rows if row[2]]
    return Table(["axis", "change", "pairs", *wanted, "diverged"], rows, title="What each axis changes, all else equal")


def _axis_rows(axis: str, records: Sequence[Record], metrics: Sequence[str]) -> list[list[Any]]:
    values: dict[str, Any] = {canonical_json(one["params"][axis]): one["params"][axis] for one in records}
    if len(values) < 2:
        return []
    base, *others = values
    rows = []
    for other in others:
        pairs = _pairs(axis, records, base, other)
        ratios = [_ratio(pairs, metric) for metric in metrics]
        share = f"{_diverged(records, axis, base)} -> {_diverged(records, axis, other)}"
        rows.append([axis, f"{short(values[base])} -> {short(values[other])}", len(pairs), *ratios, share])
    return rows


def _pairs(axis: str, records: Sequence[Record], base: str, other: str) -> list[tuple[Record, Record]]:
    def rest(record: Record) -> str:
        return canonical_json({name: value for name, value in record["params"].items() if name != axis})

    def chosen(value: str) -> dict[str, Record]:
        return {rest(one): one for one in records if canonical_json(one["params"][axis]) == value}

    left, right = chosen(base), chosen(other)
    sound = (TrialState.FINISHED, TrialState.STOPPED)
    return [
        (left[key], right[key])
        for key in left
        if key in right and left[key]["state"] in sound and right[key]["state"] in sound
    ]


def _ratio(pairs: Sequence[tuple[Record, Record]], metric: str) -> str | None:
    values = [(left["metrics"].get(metric), right["metrics"].get(metric)) for left, right in pairs]
    numbers = [(a, b) for a, b in values if a is not None and b is not None and math.isfinite(a) and math.isfinite(b)]
    ratio = geometric_mean_ratio(numbers)
    return None if ratio is None else f"x {ratio:.3g}"


def _diverged(records: Sequence[Record], axis: str, value: str) -> str:
    members = [one for one in records if canonical_json(one["params"][axis]) == value]
    results = [one for one in members if TrialState(one["state"]).is_result]
    return f"{sum(one['state'] == TrialState.DIVERGED for one in results)}/{len(results)}"
