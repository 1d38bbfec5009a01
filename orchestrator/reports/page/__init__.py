"""One page with a sweep's answer, to send and to keep: needs no orch, no database and no network, and runs no script.

Whatever the database holds is text here: the template escapes all of it, and only our own drawings are markup.
Figures and tables are bounded; what they leave out they say, with the command that shows it.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from orchestrator import __version__
from orchestrator.errors import NoResult
from orchestrator.reports.compare import compare, effects
from orchestrator.reports.health import health
from orchestrator.reports.page.facts import (
    BAD_STATES,
    command,
    failures,
    failures_command,
    in_brief,
    moment,
    sql_command,
    stability_in_words,
    unfinished,
)
from orchestrator.reports.page.sections import chart_of, sections_of
from orchestrator.reports.runs import best
from orchestrator.reports.source import Query, SweepFacts, sweep_facts
from orchestrator.reports.spec_text import spec_text
from orchestrator.reports.status import state_counts
from orchestrator.reports.table import Table, short
from orchestrator.spec.domains import is_number
from orchestrator.trial import shown

GENERATOR = "orch"  # the first word of `<meta name="generator">`
MAX_ROWS = 60  # of a table
MAX_TEXT = 400  # characters of a table's field
MAX_WORD = 34  # characters that are not wrapped
MAX_BEST = 10  # runs that no other beats
MAX_EFFECTS = 24
MAX_TRACEBACK = 6_000  # characters, the last ones
MAX_SPEC = 200_000


@dataclass(frozen=True)
class PageTable:
    """A table as the page has it: texts of bounded length, and what is left out."""

    title: str
    columns: Sequence[str]
    kinds: Sequence[str]  # by column: number; long, which may be wrapped; or word
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]


def page(
    query: Query, sweep: str, by: Sequence[str] | None, metrics: Sequence[str] | None, made_at: dt.datetime
) -> str:
    """The HTML. `by` and `metrics` as in `compare`. Raises NotFound or QueryError, with the nearest name."""
    query = _remembering(query)
    facts = sweep_facts(query, sweep)
    comparison = compare(query, [sweep], by, metrics)
    wanted = list(dict.fromkeys(metrics or facts.shown))
    axes = list(dict.fromkeys(by or facts.cell_axes))
    counts = state_counts(query, sweep)
    chart = chart_of(query, facts, axes, wanted)
    commands = _commands(query, facts, by, metrics, axes, wanted[0])
    all_cells = commands[0][0]
    failed, tracebacks = failures(query, facts)
    return _render(
        generator=f"{GENERATOR} {__version__}",
        version=__version__,
        facts=facts,
        more=facts.description.partition("\n")[2].strip("\n"),
        in_brief=in_brief(query, facts, counts),
        unfinished=unfinished(facts, counts, made_at),
        best=_best(query, facts, metrics[0] if metrics else None),
        stability=stability_in_words(chart.records, facts.unstable is not None),
        effects=None if by else first_rows(effects(query, sweep, metrics), all_cells, limit=MAX_EFFECTS),
        comparison=comparison_of(comparison, axes, wanted[0], chart.mode, all_cells),
        sections=list(sections_of(query, chart, wanted)),
        findings=first_rows(health(query, sweep), command("health", sweep)),
        failures=first_rows(failed, failures_command(sweep), sum(counts.get(state, 0) for state in BAD_STATES)),
        tracebacks=[(who, text[-MAX_TRACEBACK:]) for who, text in tracebacks],
        spec=cut(spec_text(query, sweep), MAX_SPEC),
        made_at=moment(made_at),
        commands=commands,
    )


def _commands(
    query: Query,
    facts: SweepFacts,
    by: Sequence[str] | None,
    metrics: Sequence[str] | None,
    axes: Sequence[str],
    metric: str,
) -> list[tuple[str, str]]:
    """What shows the same facts where the database is, the comparison first, each with what it shows."""
    chosen = [*(("--by", ",".join(by)) if by else ()), *(word for one in metrics or () for word in ("--metric", one))]
    return [
        (command("compare", facts.name, *chosen), "the comparison"),
        (command("best", facts.name, *(("--metric", metric) if metrics else ())), "the best run"),
        (command("runs", facts.name), "one line a trial"),
        (command("health", facts.name), "what was found"),
        (command("status", facts.name, "--spec"), "the file that runs it again"),
        (sql_command(query, facts, metric, axes), "the same by SQL"),
    ]


def _remembering(query: Query) -> Query:
    """Asks every question once: several parts need the trials, whose last values come from all points."""
    answers: dict[tuple[str, str], Any] = {}

    def ask(text: str, parameters: Any = ()) -> Any:
        asked = (text, repr(parameters))
        if asked not in answers:
            answers[asked] = query(text, parameters)
        return answers[asked]

    return ask


def _best(query: Query, facts: SweepFacts, metric: str | None) -> PageTable:
    """As `orch best` says it; without a finite run, why there is none."""
    try:
        table = best(query, facts.name, metric, None, "last")
    except NoResult as none:
        return first_rows(Table([], [], title=str(none)), "")
    return first_rows(table, command("best", facts.name), limit=MAX_BEST)


def first_rows(table: Table, all_of_it: str, num_rows: int | None = None, limit: int | None = None) -> PageTable:
    """The first rows, and the command that shows all `num_rows`."""
    rows = table.rows[: limit or MAX_ROWS]
    missing = (num_rows or len(table.rows)) - len(rows)
    left_out = [f"{missing} more: {all_of_it}"] if missing > 0 else []
    texts = [[cut(short(value), MAX_TEXT) for value in row] for row in rows]
    kinds = [_kind([row[place] for row in rows]) for place in range(len(table.columns))]
    return PageTable(table.title, table.columns, kinds, texts, [*table.notes, *left_out])


def _kind(values: Sequence[Any]) -> str:
    there = [value for value in values if value is not None]
    if there and all(map(is_number, there)):
        return "number"
    return "long" if any(len(short(value)) > MAX_WORD for value in there) else "word"


def comparison_of(table: Table, axes: Sequence[str], metric: str, mode: str, all_of_it: str) -> PageTable:
    """All cells, or those with the best means."""
    table = replace(table, title="")  # the question, which the page has already
    if len(table.rows) <= MAX_ROWS:
        return first_rows(table, all_of_it)
    mean, sign = table.columns.index(metric, len(axes) + 1), 1 if mode == "min" else -1  # behind the axes and n
    ranked = sorted(table.rows, key=lambda row: (row[mean] is None, sign * (row[mean] or 0)))
    notes = [f"the {MAX_ROWS} best of {len(table.rows)} cells by {metric}", *table.notes]
    return first_rows(replace(table, rows=ranked, notes=notes), all_of_it)


def cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}… ({len(text) - length} characters more)"


def _render(**content: Any) -> str:
    """The template with the content: escaped, control characters spelled out."""
    from jinja2 import Environment, StrictUndefined

    def readable(value: Any) -> Any:
        return shown(value) if type(value) is str else value

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=readable, trim_blocks=True, lstrip_blocks=True
    )
    template = (files("orchestrator.reports.page") / "page.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(content)
