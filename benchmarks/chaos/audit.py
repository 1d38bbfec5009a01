"""Asks SQL what a sweep left: every trial, run, step and promise, once. Repairs nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg

Connection = psycopg.Connection[Any]

CHECK_NAME = "chaos_mark"
MARK_EVERY = 25  # steps between the workload's findings, which must not be doubled either

# What must return no row, by what a row of it would mean. Parameters: sweep, num_trials, num_steps.
EMPTY = {
    "the ledger has another number of trials": """
        select sweep, trials from orch.sweeps where sweep = %(sweep)s and trials <> %(num_trials)s""",
    "the sweep is not finished": "select sweep, state from orch.sweeps where sweep = %(sweep)s and state <> 'finished'",
    "a trial has no result": """
        select trial, state, error from orch.runs
        where sweep = %(sweep)s and (state not in ('finished', 'stopped') or run_id is null or ended_at is null)""",
    "MLflow has another number of runs": """
        select sweep.experiment_id, count(run.run_uuid) from orch_ledger.sweeps as sweep
        left join public.runs as run on run.experiment_id = sweep.experiment_id::int
        where sweep.name = %(sweep)s
        group by 1 having count(run.run_uuid) <> %(num_trials)s""",
    "an MLflow run belongs to no trial": """
        select run.run_uuid, run.name, run.status from orch_ledger.sweeps as sweep
        join public.runs as run on run.experiment_id = sweep.experiment_id::int
        left join orch_ledger.trials as trial on trial.run_id = run.run_uuid
        where sweep.name = %(sweep)s and trial.id is null""",
    "an MLflow run is not ended, or says something else than the ledger": """
        select run.run_uuid, run.status, run.end_time, tag.value as state, trial.state as of_ledger
        from orch_ledger.sweeps as sweep
        join orch_ledger.trials as trial on trial.sweep_id = sweep.id
        join public.runs as run on run.run_uuid = trial.run_id
        left join public.tags as tag on tag.run_uuid = run.run_uuid and tag.key = 'orch.state'
        where sweep.name = %(sweep)s
            and (run.status <> 'FINISHED' or run.end_time is null or tag.value is distinct from trial.state)""",
    "an attempt is left open": """
        select trial.number, attempt.number, attempt.state from orch_ledger.sweeps as sweep
        join orch_ledger.trials as trial on trial.sweep_id = sweep.id
        join orch_ledger.attempts as attempt on attempt.trial_id = trial.id
        where sweep.name = %(sweep)s and (attempt.ended_at is null or attempt.state = 'running')""",
    "somebody still holds the sweep": """
        select name, holder, heartbeat_at from orch_ledger.sweeps
        where name = %(sweep)s and heartbeat_at is not null""",
    "a step is missing or there twice": """
        select trial.trial, count(point.step) as steps, count(distinct point.step) as different,
            min(point.step), max(point.step)
        from orch.runs as trial
        left join orch.metrics as point
            on point.sweep = %(sweep)s and point.run_id = trial.run_id and point.key = 'train/loss'
        where trial.sweep = %(sweep)s
        group by trial.trial
        having (count(point.step), count(distinct point.step), min(point.step), max(point.step))
            is distinct from (%(num_steps)s::bigint, %(num_steps)s::bigint, 1::bigint, %(num_steps)s::bigint)""",
    "one attempt wrote a step twice": """
        select trial.number, attempt.number, raw.key, raw.step, count(*)
        from orch_ledger.sweeps as sweep
        join orch_ledger.trials as trial on trial.sweep_id = sweep.id
        join lateral (
            select number, floor(extract(epoch from started_at) * 1000)::bigint as from_ms,
                lead(floor(extract(epoch from started_at) * 1000)::bigint, 1, 9223372036854775807)
                    over (order by number) as until_ms
            from orch_ledger.attempts where trial_id = trial.id
        ) as attempt on true
        join public.metrics as raw on raw.run_uuid = trial.run_id
            and raw.timestamp >= attempt.from_ms and raw.timestamp < attempt.until_ms
        where sweep.name = %(sweep)s
        group by 1, 2, 3, 4 having count(*) > 1
        limit 5""",
    "the latest value that MLflow shows is not the last": """
        select latest.run_uuid, latest.step, latest.value from orch.runs as trial
        join public.latest_metrics as latest on latest.run_uuid = trial.run_id and latest.key = 'train/loss'
        join orch.final_metrics as final on final.run_id = trial.run_id and final.key = 'train/loss'
        where trial.sweep = %(sweep)s and (latest.step <> %(num_steps)s or latest.value <> final.last)""",
    # Times differ; memory is measured at the first update of each process.
    "a value differs from the undisturbed twin's": """
        select trial, key, step, ours.value, twin.value as of_twin
        from (select trial, key, step, value from orch.metrics where sweep = %(sweep)s and key !~ '^(time|memory)/')
            as ours
        full join (select * from pg_temp.twin where key !~ '^(time|memory)/') as twin using (trial, key, step)
        where ours.value is distinct from twin.value
        order by step, trial, key
        limit 5""",
    "a finding is missing or there twice": f"""
        select trial.trial, count(mark.step), count(distinct mark.step) from orch.runs as trial
        left join orch.findings as mark
            on mark.sweep = %(sweep)s and mark.trial = trial.trial and mark.check_name = '{CHECK_NAME}'
        where trial.sweep = %(sweep)s
        group by 1
        having (count(mark.step), count(distinct mark.step))
            is distinct from (%(num_steps)s::bigint / {MARK_EVERY}, %(num_steps)s::bigint / {MARK_EVERY})""",
}

PROMISED = """
select count(*) from public.metrics as raw
where raw.run_uuid = %(run_id)s and raw.key = 'train/loss' and raw.step = %(step)s and raw.value = %(loss)s
    and raw.timestamp = greatest(%(timestamp_ms)s, %(from_ms)s)
"""


def audit(connection: Connection, sweep: str, num_trials: int, num_steps: int) -> Iterator[str]:
    """One line a violation: what it means and the rows that show it."""
    _store_twin(connection, sweep)
    values = {"sweep": sweep, "num_trials": num_trials, "num_steps": num_steps}
    for meaning, query in EMPTY.items():
        cursor = connection.execute(query, values)
        assert cursor.description is not None
        names = [column.name for column in cursor.description]
        if rows := cursor.fetchall():
            yield f"{meaning}: {[dict(zip(names, row, strict=True)) for row in rows[:5]]}"


def _store_twin(connection: Connection, sweep: str) -> None:
    """What the sweep's trials would report undisturbed, in a table of this connection."""
    from benchmarks.chaos.twin import values_of  # torch, which takes seconds to load

    rows = connection.execute("select trial, params from orch.runs where sweep = %s order by trial", [sweep]).fetchall()
    connection.execute("drop table if exists pg_temp.twin")
    connection.execute("create temp table twin (trial int, key text, step bigint, value double precision)")
    with connection.cursor() as cursor, cursor.copy("copy pg_temp.twin from stdin") as copy:
        for row in values_of(dict(rows)):
            copy.write_row(row)


def broken_promises(connection: Connection, sweep: str, folder: Path) -> tuple[int, list[str]]:
    """How many reports the witness of the sweep names, and those of them that are not in the database."""
    attempts = _attempts(connection, sweep)
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines(keepends=True)]
    promised = [json.loads(line) for line in lines if line.endswith("\n")]  # a killed witness leaves half a line
    broken = []
    for one in promised:
        run_id, from_ms = attempts[one["trial"], one["attempt"]]
        values = {"run_id": run_id, "from_ms": from_ms, "timestamp_ms": int(one["measured_at"] * 1000)}
        found = connection.execute(PROMISED, {**values, "step": one["step"], "loss": one["loss"]}).fetchone()
        if found != (1,):
            broken.append(f"a report that was promised to be safe is not there: {one}")
    return len(promised), broken


def _attempts(connection: Connection, sweep: str) -> dict[tuple[int, int], tuple[str, int]]:
    """Run id and start (milliseconds since the epoch) by trial and attempt."""
    query = """
        select trial.number, attempt.number, trial.run_id, attempt.started_at
        from orch_ledger.sweeps as sweep
        join orch_ledger.trials as trial on trial.sweep_id = sweep.id
        join orch_ledger.attempts as attempt on attempt.trial_id = trial.id
        where sweep.name = %(sweep)s
    """
    rows = connection.execute(query, {"sweep": sweep}).fetchall()
    return {(trial, number): (run_id, int(begun.timestamp() * 1000)) for trial, number, run_id, begun in rows}
