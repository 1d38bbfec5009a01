"""One page with a sweep's answer, to send and to keep: needs no orch, no database and no network, and runs no script.

Whatever the database holds is text here: the template escapes all of it, and only our own drawings are markup.
Figures and tables are bounded; what they leave out they say, with the command that shows it.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from orchestrator import __version__
from orchestrator.errors import NoResult
from orchestrator.reports.compare import compare, effects
from orchestrator.reports.health import health
from orchestrator.reports.page_facts import (
    BAD_STATES,
    command,
    failures,
    failures_command,
    moment,
    sql_command,
    stability_in_words,
    standing,
    unfinished,
)
from orchestrator.reports.page_figures import chart_of, sections
from orchestrator.reports.page_tables import Shown, comparison_of, cut, whole
from orchestrator.reports.runs import best
from orchestrator.reports.source import Query, SweepFacts, sweep_facts
from orchestrator.reports.spec_text import spec_text
from orchestrator.reports.status import state_counts
from orchestrator.reports.table import Table
from orchestrator.trial import shown

GENERATOR = "orch"  # the first word of `<meta name="generator">`
MAX_BEST = 10  # runs that no other beats
MAX_EFFECTS = 24
MAX_TRACEBACK = 6_000  # characters, the last ones
MAX_SPEC = 200_000


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
        standing=standing(query, facts, counts),
        unfinished=unfinished(facts, counts, made_at),
        best=_best(query, facts, metrics[0] if metrics else None),
        stability=stability_in_words(chart.records, facts.unstable is not None),
        effects=None if by else whole(effects(query, sweep, metrics), all_cells, limit=MAX_EFFECTS),
        comparison=comparison_of(comparison, len(axes), chart.mode, all_cells),
        sections=list(sections(query, chart, wanted)),
        findings=whole(health(query, sweep), command("health", sweep)),
        failures=whole(failed, failures_command(sweep), sum(counts.get(state, 0) for state in BAD_STATES)),
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
    """Asks every question once: what several parts of the page need is read once and agrees."""

    answers: dict[tuple[str, str], Any] = {}

    def ask(text: str, parameters: Sequence[Any] = ()) -> Any:
        asked = (text, repr(parameters))
        if asked not in answers:
            answers[asked] = query(text, parameters)
        return answers[asked]

    return ask


def _best(query: Query, facts: SweepFacts, metric: str | None) -> Shown:
    """As `orch best` says it; without a finite run, why there is none."""
    try:
        table = best(query, facts.name, metric, None, "last")
    except NoResult as none:
        return whole(Table([], [], title=str(none)), "")
    return whole(table, command("best", facts.name), limit=MAX_BEST)


def _render(**content: Any) -> str:
    """The template with the content: escaped, control characters spelled out."""
    from jinja2 import Environment, StrictUndefined

    def readable(value: Any) -> Any:
        return shown(value) if type(value) is str else value

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=readable, trim_blocks=True, lstrip_blocks=True
    )
    template = (files("orchestrator.reports") / "page.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(content)
