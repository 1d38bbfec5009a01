"""What a report says of a sweep in words: how it stands, where it ran, what went wrong. Reads views, draws nothing."""

from __future__ import annotations

import datetime as dt
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.reports.cells import Record, diverged_of, unstable_of
from orchestrator.reports.source import Query, SweepFacts, quoted, view_of
from orchestrator.reports.statistics import wilson
from orchestrator.reports.table import Table, counted
from orchestrator.trial import TrialState, shown

MAX_NAMES = 4  # hosts, devices or commits that are named
MAX_FAILURES = 40
MAX_TRACEBACKS = 5
SHORT_COMMIT = 10  # characters

BAD_STATES = (TrialState.FAILED, TrialState.LOST, TrialState.KILLED, TrialState.DIVERGED)


def in_brief(query: Query, facts: SweepFacts, counts: Mapping[str, int]) -> list[str]:
    """State and counts; when and how long; where; tags. A phrase each."""
    columns, [row] = query(
        "select started_at, ended_at, seconds, workload, tags from orch.sweeps where sweep = %s", (facts.name,)
    )
    sweep = dict(zip(columns, row, strict=True))
    in_words = ", ".join(f"{count} {state}" for state, count in counts.items())
    phrases = [f"{facts.state}: {counted(sum(counts.values()), 'trial')}" + (f" ({in_words})" if in_words else "")]
    phrases += _when(sweep)
    phrases += [f"workload {sweep['workload']}", *_where(query, facts.name)]
    return phrases + [f"{name}: {value}" for name, value in (sweep["tags"] or {}).items()]


def _when(sweep: Mapping[str, Any]) -> list[str]:
    started, ended = sweep["started_at"], sweep["ended_at"]
    if started is None:
        return ["not started"]
    training = f"{_rounded(sweep['seconds'])} of training"
    if ended is None:
        return [f"since {moment(started)}, {training}"]
    return [f"{moment(started)}, took {_rounded((ended - started).total_seconds())}, {training}"]


def _where(query: Query, sweep: str) -> list[str]:
    phrases = []
    for column, word, length in (
        ("host", "host", None),
        ("device", "device", None),
        ("git_commit", "git", SHORT_COMMIT),
    ):
        _, rows = query(
            f"select {column} from orch.runs where sweep = %s and {column} <> '' group by 1 order by count(*) desc, 1",
            (sweep,),
        )
        names = [name[:length] for (name,) in rows[:MAX_NAMES]]
        more = f" and {len(rows) - MAX_NAMES} more" if len(rows) > MAX_NAMES else ""
        if names:
            phrases.append(f"{word} {', '.join(names)}{more}")
    return phrases


def moment(time: dt.datetime) -> str:
    return time.astimezone(dt.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _rounded(seconds: float) -> str:
    return str(dt.timedelta(seconds=max(1, round(seconds))))


def unfinished(facts: SweepFacts, counts: Mapping[str, int], made_at: dt.datetime) -> str:
    """That the page shows a part, and how it goes on; empty for a sweep that is over."""
    if facts.state == "finished":
        return ""
    num_results = sum(count for state, count in counts.items() if TrialState(state).is_result)
    part = f"{num_results} of {counted(sum(counts.values()), 'trial')} so far have a result"
    if facts.state == "running":
        return f"This sweep is still running: {part}. The page shows how it stood at {moment(made_at)}."
    way_on = command("resume", facts.name)
    return f"This sweep is not finished ({facts.state}): {part}. It goes on with: {way_on}"


def stability_in_words(records: Sequence[Record], has_rule: bool) -> list[str]:
    """How many of all results diverged, and are unstable where the sweep says what that is; with 95 % intervals."""
    sentences = [_share("diverged", *diverged_of(records))]
    if has_rule:
        sentences.append(_share("unstable, diverged ones included", *unstable_of(records)))
    return [sentence for sentence in sentences if sentence]


def _share(word: str, count: int, n: int) -> str:
    interval = wilson(count, n)
    if interval is None:
        return ""
    low, high = (f"{100 * end:.0f}" for end in interval)
    return f"{word}: {count} of {counted(n, 'result')} (95 % interval of the share: {low} to {high} %)"


def failures(query: Query, facts: SweepFacts) -> tuple[Table, list[tuple[str, str]]]:
    """The trials without a sound result and why, failed ones first; each different traceback once, with whose it is."""
    _, rows = query(
        """
        select trial, state, coalesce(diverged_at, last_step), params,
               coalesce(nullif(reason, ''), split_part(error, E'\n', 1)), error
        from orch.runs where sweep = %(sweep)s and state = any(%(states)s)
        order by array_position(%(states)s, state), trial limit %(limit)s
        """,
        {"sweep": facts.name, "states": list(map(str, BAD_STATES)), "limit": MAX_FAILURES},
    )
    lines = [
        [trial, state, step, *(params.get(axis) for axis in facts.axes), reason]
        for trial, state, step, params, reason, _ in rows
    ]
    raised: dict[str, list[int]] = {}
    for trial, *_, error in rows:
        if error:
            raised.setdefault(error, []).append(trial)
    tracebacks = [(f"trial {', '.join(map(str, who[:10]))}", text) for text, who in raised.items()]
    return Table(["trial", "state", "step", *facts.axes, "reason"], lines), tracebacks[:MAX_TRACEBACKS]


def failures_command(sweep: str) -> str:
    states = ", ".join(f"'{state}'" for state in BAD_STATES)
    return command("runs", sweep, "--where", f"state in ({states})")


def sql_command(query: Query, facts: SweepFacts, metric: str, axes: Sequence[str]) -> str:
    """A query of the sweep's own view that counts and averages as the page does; columns that it has not are left out.

    Single quotes are for the shell: that a value is finite is said without them.
    """
    known, _ = query(f"select * from {view_of(facts.name)} limit 0")
    column = next((name for name in (f"{metric}_metric", metric) if name in known), None)
    by = [quoted(axis) for axis in axes if axis in known]
    mean = [f"avg({quoted(column)}) filter (where not diverged and abs({quoted(column)}) < 1e308)"] if column else []
    what = ", ".join([*by, "count(*) as n", *mean])
    text = f"select {what} from {quoted('sweep_' + facts.name)} where verdict is not null"
    places = ", ".join(str(place) for place in range(1, len(by) + 1))
    return command("sql", text + (f" group by {places} order by {places}" if by else ""))


def command(*words: str) -> str:
    """`orch compare zloss`, as a shell takes it."""
    return shown(" ".join(["orch", *map(_quoted, words)]))


def _quoted(word: str) -> str:
    """In double quotes where that reads better: around SQL with texts."""
    return f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else shlex.quote(word)
