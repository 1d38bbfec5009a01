"""One line a trial, and the best trial. Diverged trials are shown but never best; a stopped one only with a note."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from orchestrator.errors import NoResult, QueryError
from orchestrator.reports.pareto import pareto_front
from orchestrator.reports.source import (
    Query,
    SweepFacts,
    check_metrics,
    nearest,
    quoted,
    sweep_facts,
    trial_records,
    view_of,
)
from orchestrator.reports.status import state_counts
from orchestrator.reports.table import Table, short
from orchestrator.trial import TrialState

Scope = Literal["last", "best"]


def runs(
    query: Query, sweep: str, where: str | None, sort: str | None, descending: bool, limit: int | None, whole: bool
) -> Table:
    """One row a trial of the view `sweep_<name>`; `whole` gives every column, else what a person compares.

    `where` is the user's SQL over that view; a mistake in it raises QueryError. Non-finite values sort last.
    """
    facts = sweep_facts(query, sweep)
    known, _ = query(f"select * from {view_of(sweep)} limit 0")
    if sort is not None and sort not in known:
        raise QueryError(f"--sort  sweep {sweep} has no column {sort!r}; {nearest(sort, known)}")
    if where:
        _check_condition(query, sweep, where)
    wanted = ["trial", "state", "verdict", *facts.axes, *facts.shown]
    columns = list(known) if whole else [name for name in dict.fromkeys(wanted) if name in known]
    text = f"select {', '.join(map(quoted, columns))} from {view_of(sweep)}"
    text += f" where ({where}\n)" if where else ""
    text += f" order by {_order(sort or 'trial', descending)}"
    text += f" limit {int(limit)}" if limit is not None else ""
    names, rows = query(text)
    return Table(names, rows, title=facts.question)


def _check_condition(query: Query, sweep: str, where: str) -> None:
    """Tries the person's condition alone, so that a mistake shows their words and none of ours."""
    try:
        query(f"select count(*) from {view_of(sweep)} where (\n{where}\n)")
    except QueryError as error:
        said = str(error).splitlines()
        ours = len(said) > 1 and said[1].strip() == ")"  # the mistake shows only behind the condition's end
        shown = [said[0], f"  {where}", *said[3:]] if ours else said
        raise QueryError("--where  " + "\n".join(shown)) from None


def _order(column: str, descending: bool) -> str:
    name = quoted(column)
    direction = "desc" if descending else "asc"
    return f"({name}::text in ('NaN', 'Infinity', '-Infinity')) nulls last, {name} {direction} nulls last, trial"


def best(query: Query, sweep: str, metric: str | None, mode: str | None, scope: Scope) -> Table:
    """The best finite run of a sweep with its swept parameters. Raises NoResult when no run has a finite value.

    Of a sweep with several metrics, and none chosen: every run that no other one beats in all of them.
    """
    facts = sweep_facts(query, sweep)
    if metric is None and facts.more_objectives:
        return _front(query, facts, scope)
    if metric is not None:
        check_metrics(query, [sweep], [metric])
    metric = metric or facts.metric
    mode = mode or facts.mode_of(metric)
    ranked = _ranked(query, sweep, metric, mode, scope)
    if not ranked:
        raise NoResult(_why_no_best(query, sweep, metric))
    meaning = "its last report" if scope == "last" else "its best report"
    title = f"best {metric} ({mode}) of {sweep}, judged by {meaning}"
    return _shown(query, facts, ranked[:1], {metric: [ranked[0]["value"]]}, title, _about_stopped(ranked, metric))


def _ranked(query: Query, sweep: str, metric: str, mode: str, scope: Scope) -> list[dict[str, Any]]:
    """The trials with a finite value, the best first, of those that finished and of those that were stopped."""
    value = "f.last" if scope == "last" else ("f.min" if mode == "min" else "f.max")
    direction = "asc" if mode == "min" else "desc"
    names, rows = query(
        f"""
        select r.trial, r.run_id, r.state, r.last_step, r.params, {value} as value
        from orch.runs r join orch.final_metrics f on f.run_id = r.run_id and f.sweep = r.sweep
        where r.sweep = %s and f.key = %s and r.state in ('finished', 'stopped')
          and {value} not in ('NaN', 'Infinity', '-Infinity')
        order by {value} {direction}, r.state, r.trial
        """,
        (sweep, metric),
    )
    return [dict(zip(names, row, strict=True)) for row in rows]


def _front(query: Query, facts: SweepFacts, scope: Scope) -> Table:
    if scope == "best":
        raise QueryError("--scope best  compares values of different steps; name one of the metrics with --metric")
    objectives = [(facts.metric, facts.mode), *facts.more_objectives]
    names = [name for name, _ in objectives]
    known = [
        record
        for record in trial_records(query, facts.name, names)
        if TrialState(record["state"]).is_sound
        and all(math.isfinite(record["metrics"].get(name, math.nan)) for name in names)
    ]
    points = [[record["metrics"][name] for name in names] for record in known]
    front = [known[place] for place in pareto_front(points, [mode for _, mode in objectives])]
    if not front:
        raise NoResult(_why_no_best(query, facts.name, " and ".join(names)))
    stopped = [str(record["trial"]) for record in front if record["state"] == TrialState.STOPPED]
    notes = [f"stopped before their end: trial {', '.join(stopped)}"] if stopped else []
    wanted = ", ".join(f"{name} ({mode})" for name, mode in objectives)
    title = f"{len(front)} of {len(known)} runs of {facts.name} that no other beats in {wanted}, by their last report"
    values = {name: [record["metrics"][name] for record in front] for name in names}
    return _shown(query, facts, front, values, title, notes)


def _shown(
    query: Query,
    facts: SweepFacts,
    records: Sequence[Mapping[str, Any]],
    values: Mapping[str, Sequence[float]],
    title: str,
    notes: Sequence[str],
) -> Table:
    """A row a trial: its values of the metrics, and the parameters with which it ended."""
    copied = _copied_params(query, facts.name, records)
    rows = []
    for place, record in enumerate(records):
        params = {**record["params"], **copied.get(record["trial"], {})}
        swept = [params.get(axis) for axis in facts.axes]
        said = [column[place] for column in values.values()]
        rows.append([record["trial"], *said, *swept, record["state"], record["run_id"]])
    if copied:
        numbers = ", ".join(map(str, sorted(copied)))
        ways = f"trial {numbers} copied others on the way; shown is how it ended, the way is in orch.decisions"
        notes = [*notes, ways]
    return Table(["trial", *values, *facts.axes, "state", "run_id"], rows, title=title, notes=notes)


def _about_stopped(ranked: Sequence[Mapping[str, Any]], metric: str) -> list[str]:
    """What a person must know before taking a trial that was stopped for better than one that finished."""
    num_stopped = sum(record["state"] == TrialState.STOPPED for record in ranked)
    if not num_stopped:
        return []
    notes = [f"{num_stopped} of the {len(ranked)} runs were stopped before their end and count with what they reported"]
    if ranked[0]["state"] == TrialState.STOPPED:
        finished = next((record for record in ranked if record["state"] == TrialState.FINISHED), None)
        against = f"trial {finished['trial']} with {metric} {short(finished['value'])}" if finished else "none"
        notes.append(f"this one was stopped at step {ranked[0]['last_step']}; the best that finished is {against}")
    return notes


def _copied_params(query: Query, sweep: str, records: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """What copies of other trials changed of these trials' parameters, by trial."""
    trials = [record["trial"] for record in records]
    _, rows = query(
        "select trial, params from orch.decisions where sweep = %s and trial = any(%s) and action = 'exploit'"
        " order by trial, step",
        (sweep, trials),
    )
    changed: dict[int, dict[str, Any]] = {}
    for trial, params in rows:
        changed.setdefault(trial, {}).update(params)
    return changed


def _why_no_best(query: Query, sweep: str, metric: str) -> str:
    counts = ", ".join(f"{count} {state}" for state, count in state_counts(query, sweep).items()) or "no trials"
    _, keys = query("select distinct key from orch.final_metrics where sweep = %s order by 1 limit 12", (sweep,))
    known = f"; metrics it has: {', '.join(key for (key,) in keys)}" if keys else ""
    return f"sweep {sweep} has no finite run for {metric!r} ({counts}){known}"
