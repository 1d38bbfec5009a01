"""One line a trial, and the best trial. Diverged trials are shown but never best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from orchestrator.errors import NoResult, QueryError
from orchestrator.reports.source import Query, check_metrics, nearest, quoted, sweep_facts, view_of
from orchestrator.reports.status import state_counts
from orchestrator.reports.table import Table

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
    wanted = ["trial", "state", "verdict", *facts.axes, facts.metric, *facts.show]
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
    """The best finite run of a sweep with its swept parameters. Raises NoResult when no run has a finite value."""
    facts = sweep_facts(query, sweep)
    if metric is not None:
        check_metrics(query, [sweep], [metric])
    metric, mode = metric or facts.metric, mode or facts.mode
    value = "f.last" if scope == "last" else ("f.min" if mode == "min" else "f.max")
    direction = "asc" if mode == "min" else "desc"
    names, rows = query(
        f"""
        select r.trial, r.run_id, r.state, {value} as value, r.params
        from orch.runs r join orch.final_metrics f on f.run_id = r.run_id and f.sweep = r.sweep
        where r.sweep = %s and f.key = %s and r.state in ('finished', 'stopped')
          and {value} not in ('NaN', 'Infinity', '-Infinity')
        order by {value} {direction}, r.trial limit 1
        """,
        (sweep, metric),
    )
    if not rows:
        raise NoResult(_why_no_best(query, sweep, metric))
    record = dict(zip(names, rows[0], strict=True))
    swept = {axis: record["params"].get(axis) for axis in facts.axes}
    columns: Sequence[str] = ["trial", metric, *swept, "state", "run_id"]
    row: Sequence[Any] = [record["trial"], record["value"], *swept.values(), record["state"], record["run_id"]]
    meaning = "its last report" if scope == "last" else "its best report"
    return Table(columns, [row], title=f"best {metric} ({mode}) of {sweep}, judged by {meaning}")


def _why_no_best(query: Query, sweep: str, metric: str) -> str:
    counts = ", ".join(f"{count} {state}" for state, count in state_counts(query, sweep).items()) or "no trials"
    _, keys = query("select distinct key from orch.final_metrics where sweep = %s order by 1 limit 12", (sweep,))
    known = f"; metrics it has: {', '.join(key for (key,) in keys)}" if keys else ""
    return f"sweep {sweep} has no finite run for {metric!r} ({counts}){known}"
