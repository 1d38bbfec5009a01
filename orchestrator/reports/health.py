"""What probes and checks found: in a sweep, one row a check, worst first; in a run, one row a finding, in order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import NotFound
from orchestrator.reports.source import Query, nearest, sweep_facts, sweep_names
from orchestrator.reports.table import Table, counted, short
from orchestrator.trial import Params, Severity, canonical_json

MIN_PREFIX = 8  # characters of a run's id that may stand for all of it
PREFLIGHT = "preflight"


def health(query: Query, name: str, at_least: Severity = Severity.INFO) -> Table:
    """The findings of a sweep, or of the run that `name` means: MLflow's id, its first characters, or SWEEP/TRIAL.

    Raises NotFound with the nearest name.
    """
    sweeps = sweep_names(query)
    if name in sweeps:
        return _sweep_health(query, name, at_least)
    return _run_health(query, *_run_of(query, name, sweeps), at_least)


@dataclass(frozen=True)
class Found:
    """One check's findings of one severity in a sweep; no trials: in its preflight."""

    severity: Severity
    check_name: str
    trials: tuple[int, ...]


def found_in(query: Query, sweep: str) -> list[Found]:
    """Worst severity first, then what most trials have."""
    _, rows = query(
        """
        select severity, check_name, coalesce(array_agg(distinct trial) filter (where trial is not null), '{}')
        from orch.findings where sweep = %s group by severity, check_name, trial is null
        """,
        (sweep,),
    )
    found = [Found(Severity(severity), check, tuple(trials)) for severity, check, trials in rows]
    return sorted(found, key=lambda one: (-one.severity.rank, -len(one.trials), one.check_name))


def found_in_words(found: Sequence[Found]) -> str:
    """`2 errors in 8 trials (no_gradient 6, loss_factor 2), 1 warning in 3 trials (loss_spike 3)`; empty: nothing."""
    parts = []
    for severity, group in itertools.groupby(found, lambda one: one.severity):
        members = list(group)
        trials = {trial for one in members for trial in one.trials}
        names = ", ".join(f"{one.check_name} {len(one.trials) or f'in the {PREFLIGHT}'}" for one in members)
        where = f" in {counted(len(trials), 'trial')}" if trials else ""
        parts.append(f"{counted(len({one.check_name for one in members}), severity.value)}{where} ({names})")
    return ", ".join(parts)


def telling(affected: Sequence[Params], others: Sequence[Params], axes: Iterable[str]) -> dict[str, list[Any]]:
    """What the affected trials have and no other one has: the values of one axis, or else a combination of axes.

    The first axis whose values do not occur among the others; without one, the fewest values that all affected trials
    share and none of the others has together. Empty: nothing tells them apart, or there are no others.
    """
    values = {axis: _distinct(one.get(axis) for one in affected) for axis in axes}
    if not others:
        return {}
    for axis, own in values.items():
        if own.keys().isdisjoint(canonical_json(one.get(axis)) for one in others):
            return {axis: list(own.values())}
    shared = {axis: next(iter(own)) for axis, own in values.items() if len(own) == 1}
    for size in range(2, len(shared) + 1):
        for some in itertools.combinations(shared, size):
            if not any(all(canonical_json(one.get(axis)) == shared[axis] for axis in some) for one in others):
                return {axis: list(values[axis].values()) for axis in some}
    return {}


def values_in_words(values: Mapping[str, Sequence[Any]]) -> str:
    """`precision=bf16 or bf16-softmax, k=1`."""
    return ", ".join(f"{axis}={' or '.join(map(short, some))}" for axis, some in values.items())


def _sweep_health(query: Query, sweep: str, at_least: Severity) -> Table:
    facts = sweep_facts(query, sweep)
    _, trials = query("select trial, params, verdict from orch.runs where sweep = %s order by trial", (sweep,))
    judged = {trial: params for trial, params, verdict in trials if verdict}
    first = _first_findings(query, sweep)
    rows = []
    for one in found_in(query, sweep):
        if one.severity.rank < at_least.rank:
            continue
        affected = [params for trial, params in judged.items() if trial in one.trials]
        others = [params for trial, params in judged.items() if trial not in one.trials]
        values = telling(affected, others, facts.cell_axes) if affected else {}
        where = f"all with {values_in_words(values)}" if values else None
        count = f"{len(one.trials)}/{len(trials)}" if one.trials else PREFLIGHT
        trial, step, message, advice = first[one.severity, one.check_name, bool(one.trials)]
        rows.append([one.severity.value, one.check_name, count, trial, step, where, message, advice])
    verdicts = [verdict for _, _, verdict in trials]
    title = f"{sweep}: {_verdicts_in_words(verdicts)}" + ("" if rows else f"; {_nothing(at_least)}")
    columns = ["severity", "check", "trials", "first trial", "step", "where", "message", "advice"]
    return Table(columns, rows, title=title)


def _first_findings(query: Query, sweep: str) -> dict[tuple[Severity, str, bool], tuple[Any, ...]]:
    """Trial, step, message and advice of the first finding by (severity, check, whether it is a trial's)."""
    _, rows = query(
        """
        select distinct on (severity, check_name, trial is not null)
            severity, check_name, trial is not null, trial, step, message, advice
        from orch.findings where sweep = %s
        order by severity, check_name, trial is not null, trial, step nulls first, created_at
        """,
        (sweep,),
    )
    return {(Severity(severity), check, is_run): tuple(rest) for severity, check, is_run, *rest in rows}


def _run_health(query: Query, sweep: str, trial: int, at_least: Severity) -> Table:
    """Worst first, and of these in the order of steps; what belongs to no step comes first."""
    columns, rows = query(
        """
        select step, severity, check_name as check, value, threshold, message, advice
        from orch.findings where sweep = %s and trial = %s and severity = any(%s)
        order by array_position(array['error', 'warning', 'info'], severity), step nulls first, created_at
        """,
        (sweep, trial, [one.value for one in Severity if one.rank >= at_least.rank]),
    )
    _, [(run_id, state, verdict, params)] = query(
        "select run_id, state, verdict, params from orch.runs where sweep = %s and trial = %s", (sweep, trial)
    )
    axes = " ".join(f"{axis}={short(params.get(axis))}" for axis in sweep_facts(query, sweep).axes)
    title = f"{sweep}/{trial}  {axes}  run {run_id or 'not begun'}: {verdict or f'{state}, without a verdict'}"
    return Table(columns, rows, title=title + ("" if rows else f"; {_nothing(at_least)}"))


def _run_of(query: Query, name: str, sweeps: Sequence[str]) -> tuple[str, int]:
    """Sweep and trial of a run. Raises NotFound."""
    sweep, _, trial = name.partition("/")
    if sweep in sweeps:
        _, found = query("select trial from orch.runs where sweep = %s and trial::text = %s", (sweep, trial))
        if not found:
            _, [(count,)] = query("select count(*) from orch.runs where sweep = %s", (sweep,))
            raise NotFound(f"sweep {sweep} has no trial {trial!r}; its {count} trials count from 0")
        return sweep, found[0][0]
    found = []
    if len(name) >= MIN_PREFIX:
        _, found = query("select sweep, trial, run_id from orch.runs where starts_with(run_id, %s) limit 3", (name,))
    if not found:
        hint = nearest(sweep, sweeps) if sweeps else "there is no sweep yet"
        forms = f"a run is SWEEP/TRIAL, or {MIN_PREFIX} or more characters of its id"
        raise NotFound(f"unknown sweep or run {name!r} ({forms}); {hint}")
    if len(found) > 1:
        which = ", ".join(f"{run_id} ({its_sweep}/{number})" for its_sweep, number, run_id in found)
        raise NotFound(f"{name!r} is the beginning of more than one run's id: {which}")
    return found[0][0], found[0][1]


def _verdicts_in_words(verdicts: Sequence[str | None]) -> str:
    """`40 of 48 trials are healthy, 4 warning, 3 suspect, 1 diverged`."""
    healthy, total = verdicts.count("healthy"), len(verdicts)
    rest = [f"{verdicts.count(one)} {one}" for one in ("warning", "suspect", "diverged") if one in verdicts]
    open_ones = [f"{verdicts.count(None)} without a result"] if None in verdicts else []
    return ", ".join([f"{healthy} of {counted(total, 'trial')} are healthy", *rest, *open_ones])


def _nothing(at_least: Severity) -> str:
    return "nothing was found" if at_least is Severity.INFO else f"nothing of severity {at_least} or worse was found"


def _distinct(values: Iterable[Any]) -> dict[str, Any]:
    """Each value once, by its text."""
    return {canonical_json(value): value for value in values}
