"""Where sweeps stand: all of them in a line each, or one with the trials that need a look."""

from __future__ import annotations

from orchestrator.reports.source import Query, sweep_facts
from orchestrator.reports.table import Table


def all_sweeps(query: Query) -> Table:
    columns, rows = query(
        "select sweep, workload, state, trials, finished, diverged, failed, started_at, ended_at"
        " from orch.sweeps order by started_at desc nulls last"
    )
    notes = () if rows else ("No sweep yet. Start one: orch sweep sweeps/zloss.yaml",)
    return Table(columns, rows, notes=notes)


def one_sweep(query: Query, sweep: str) -> Table:
    """Counts by state in the title; a row for every trial that runs, paused, failed or was cut short, and why."""
    facts = sweep_facts(query, sweep)
    counts = ", ".join(f"{count} {state}" for state, count in state_counts(query, sweep).items()) or "no trials yet"
    columns, rows = query(
        """
        select trial, state, last_step as step, attempts, started_at, seconds, host,
               coalesce(nullif(reason, ''), split_part(error, E'\n', 1)) as reason
        from orch.runs
        where sweep = %s
          and (state in ('running', 'stopped', 'failed', 'killed', 'lost') or (state = 'waiting' and attempts > 0))
        order by trial
        """,
        (sweep,),
    )
    return Table(columns, rows, title=f"{sweep} ({facts.workload}) is {facts.state}: {counts}")


def state_counts(query: Query, sweep: str) -> dict[str, int]:
    """How many trials of a sweep are in each state."""
    _, rows = query("select state, count(*) from orch.runs where sweep = %s group by 1 order by 1", (sweep,))
    return {state: int(count) for state, count in rows}
