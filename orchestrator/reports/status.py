"""Where sweeps stand: all of them in a line each, or one with the trials that need a look."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from orchestrator.reports.source import Query, sweep_facts
from orchestrator.reports.table import Table


def all_sweeps(query: Query) -> Table:
    columns, rows = query(
        "select sweep, workload, state, trials, finished, diverged, failed, started_at, ended_at, holder"
        " from orch.sweeps order by started_at desc nulls last"
    )
    notes = () if rows else ("No sweep yet. Start one: orch sweep sweeps/zloss.yaml",)
    return Table(columns, rows, notes=notes)


def one_sweep(query: Query, sweep: str, is_dead: Callable[[str], bool]) -> Table:
    """Counts by state in the title; a row for every trial that runs, paused, failed or was cut short, and why.

    `is_dead` knows of a driver whether it has died.
    """
    facts = sweep_facts(query, sweep)
    counts = state_counts(query, sweep)
    in_words = ", ".join(f"{count} {state}" for state, count in counts.items()) or "no trials yet"
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
    notes = [*_driver(query, sweep, facts.state, is_dead), *way_on(sweep, counts)]
    return Table(columns, rows, title=f"{sweep} ({facts.workload}) is {facts.state}: {in_words}", notes=notes)


def way_on(sweep: str, counts: Mapping[str, int]) -> list[str]:
    """What to type where trials failed."""
    num = counts.get("failed", 0)
    return [f"run the {num} failed again: orch resume {sweep} --failed"] if num else []


def _driver(query: Query, sweep: str, state: str, is_dead: Callable[[str], bool]) -> list[str]:
    """Who drives the sweep, or how to go on with it."""
    _, [(holder, silent_s)] = query(
        "select holder, extract(epoch from clock_timestamp() - heartbeat_at) from orch.sweeps where sweep = %s",
        (sweep,),
    )
    if holder is not None and is_dead(holder):
        cannot = "which the database cannot note at the moment (is it read-only?)"
        return [f"its command {holder} died, {cannot}; afterwards: orch resume {sweep}"]
    if holder is not None:
        return [f"driven by {holder}, last heard of {max(0.0, float(silent_s)):.0f} s ago: orch cancel {sweep}"]
    return [] if state == "finished" else [f"nobody drives it; go on with what is left: orch resume {sweep}"]


def state_counts(query: Query, sweep: str) -> dict[str, int]:
    """How many trials of a sweep are in each state."""
    _, rows = query("select state, count(*) from orch.runs where sweep = %s group by 1 order by 1", (sweep,))
    return {state: int(count) for state, count in rows}
