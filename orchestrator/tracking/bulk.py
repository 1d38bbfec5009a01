"""Writes the points of many runs into MLflow's tables in a few set-based statements. Never creates or ends a run.

The rows are the ones MLflow 3.17's own `SqlAlchemyStore.log_batch` would leave behind: NaN is value 0 with a flag,
infinity the largest double, and `latest_metrics` holds the greatest (step, timestamp, value) of a key.
Writing the same points twice changes nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import psycopg

from orchestrator.tracking.records import DecisionRow, FindingRow, LogLine, Points
from orchestrator.trial import canonical_json

MAX_FLOAT = sys.float_info.max  # what MLflow stores for infinity


class MetricRow(NamedTuple):
    """A row of `public.metrics`, in the order of COPY's columns."""

    run_id: str
    key: str
    value: float
    timestamp_ms: int
    step: int
    is_nan: bool

    @property
    def recency(self) -> tuple[int, int, float]:
        """MLflow's rule for the latest metric (`_update_latest_metrics_if_necessary`): the greater one wins."""
        return self.step, self.timestamp_ms, self.value


def rows_of(points: Iterable[Points]) -> list[MetricRow]:
    """The rows MLflow stores for the points, as `SqlAlchemyStore.sanitize_metric_value` has it."""
    return [
        MetricRow(point.run_id, key, *_stored_value(value, point))
        for point in points
        for key, value in point.metrics.items()
    ]


def _stored_value(value: float, point: Points) -> tuple[float, int, int, bool]:
    is_nan = math.isnan(value)
    finite = 0.0 if is_nan else max(-MAX_FLOAT, min(MAX_FLOAT, float(value)))
    return finite, point.timestamp_ms, point.step, is_nan


def latest_of(rows: Iterable[MetricRow]) -> list[MetricRow]:
    """The winning row of each (run, key), sorted by both: every writer then locks rows in the same order."""
    latest: dict[tuple[str, str], MetricRow] = {}
    for row in rows:
        place = row.run_id, row.key
        if place not in latest or row.recency > latest[place].recency:
            latest[place] = row
    return [latest[place] for place in sorted(latest)]


def without_late_words(connection: psycopg.Connection[Any], points: Sequence[Points]) -> list[Points]:
    """The points without what a replaced attempt measured after its successor had begun, from its first step on.

    Such an attempt's command was silent for too long and does not know yet that another one has the sweep. What was
    measured before counts as long as nothing supersedes it, however late it comes.
    """
    attempts = sorted({(point.trial_id, point.attempt) for point in points})
    later: dict[tuple[int, int], list[tuple[int, int]]] = {}
    columns = [list(column) for column in zip(*attempts, strict=True)]
    for trial_id, attempt, *begun in connection.execute(SUCCESSORS, columns) if attempts else ():
        later.setdefault((trial_id, attempt), []).append((begun[0], begun[1]))

    def is_late(point: Points) -> bool:
        successors = later.get((point.trial_id, point.attempt), ())
        return any(point.step >= step and point.timestamp_ms >= began_ms for step, began_ms in successors)

    return [point for point in points if not is_late(point)] if later else list(points)


def write_rows(connection: psycopg.Connection[Any], rows: Sequence[MetricRow]) -> frozenset[str]:
    """Writes the rows in one transaction. Returns the ids of runs that MLflow does not have (any more) or has deleted.

    Their rows are left out. Raises psycopg's DataError or IntegrityError, having written nothing, if a row cannot be
    stored at all.
    """
    with connection.transaction(), connection.cursor() as cursor:
        missing = _missing_runs(cursor, {row.run_id for row in rows})
        accepted = [row for row in rows if row.run_id not in missing]
        if accepted:
            _insert_metrics(connection, cursor, sorted(set(accepted)))
            cursor.execute(UPSERT_LATEST, _columns(latest_of(accepted)))
    return missing


def write_findings(connection: psycopg.Connection[Any], rows: Sequence[FindingRow]) -> None:
    """Writes the findings and what MLflow shows of them in one transaction; those already there stay as they are.

    Raises as `write_rows` does.
    """
    trials = {"trial_ids": sorted({row.trial_id for row in rows if row.trial_id is not None})}
    with connection.transaction(), connection.cursor() as cursor:
        cursor.execute(LOCK_TRIALS, trials)
        cursor.executemany(INSERT_FINDING, [_finding_values(row) for row in rows])
        cursor.execute(MIRROR_FINDINGS, trials)


def write_decisions(connection: psycopg.Connection[Any], rows: Sequence[DecisionRow]) -> None:
    """Writes the decisions in their order; those already there stay as they are. Raises as `write_rows` does."""
    with connection.transaction(), connection.cursor() as cursor:
        cursor.executemany(INSERT_DECISION, [_decision_values(row) for row in rows])


def write_logs(connection: psycopg.Connection[Any], rows: Sequence[LogLine]) -> None:
    """Writes the lines, many in one statement; those already there stay as they are.

    Lines of a sweep that was deleted are left out. Raises as `write_rows` does.
    """
    columns = zip(*map(_log_values, rows), strict=True)
    with connection.transaction():
        connection.execute(INSERT_LOGS, [list(column) for column in columns])


SUCCESSORS = """
select given.trial_id, given.attempt, later.first_step, floor(extract(epoch from later.started_at) * 1000)::int8
from unnest(%s::int8[], %s::int4[]) as given (trial_id, attempt)
join orch_ledger.attempts as later on later.trial_id = given.trial_id and later.number > given.attempt
"""

COPY_METRICS = "copy public.metrics (run_uuid, key, value, timestamp, step, is_nan) from stdin"

UNNEST = "select * from unnest(%s::text[], %s::text[], %s::float8[], %s::int8[], %s::int8[], %s::bool[])"

INSERT_METRICS = f"""
insert into public.metrics (run_uuid, key, value, timestamp, step, is_nan) {UNNEST}
on conflict do nothing
"""

UPSERT_LATEST = f"""
insert into public.latest_metrics as old (run_uuid, key, value, timestamp, step, is_nan) {UNNEST}
on conflict (key, run_uuid) do update
set value = excluded.value, timestamp = excluded.timestamp, step = excluded.step, is_nan = excluded.is_nan
where (excluded.step, excluded.timestamp, excluded.value) > (old.step, old.timestamp, old.value)
"""

# The lock keeps a run from being deleted between this look and the insert; it does not hinder updates of the run.
ACTIVE_RUNS = """
select run_uuid from public.runs
where run_uuid = any(%s) and lifecycle_stage = 'active'
order by run_uuid
for key share
"""

# Whoever changes a trial's findings or its state waits here for the other; the later one sees both and sets the tags.
LOCK_TRIALS = "select from orch_ledger.trials where id = any(%(trial_ids)s) order by id for no key update"

# One tag a check, its worst finding and of these the first: `orch.finding.loss_spike` = `error at step 120: ...`. And
# `orch.verdict` once the trial has a result. Which findings count, and what they make of a trial, is what the views
# `orch.findings` and `orch.runs` say. Names and values are cut to MLflow's widths. May be said again at any time.
MIRROR_FINDINGS = """
with standing as (
    select trial.run_id, finding.id, finding.check_name, finding.severity, finding.step, finding.message
    from orch_ledger.trials as trial
    join orch_ledger.findings as finding on finding.trial_id = trial.id
    where trial.id = any(%(trial_ids)s)
        and not exists (
            select
            from orch_ledger.attempts as later
            where later.trial_id = trial.id
                and later.number > finding.attempt
                and later.first_step <= coalesce(finding.step, 0)
        )
),
found as (
    select distinct on (run_id, key)
        run_id,
        left('orch.finding.' || check_name, 250) as key,
        left(severity || coalesce(' at step ' || step, '') || ': ' || message, 8000) as value
    from standing
    order by run_id, key, array_position(array['error', 'warning', 'info'], severity), step, id
),
judged as (
    select
        trial.run_id,
        'orch.verdict' as key,
        case
            when trial.state = 'diverged' then 'diverged'
            when exists (select from standing where run_id = trial.run_id and severity = 'error') then 'suspect'
            when exists (select from standing where run_id = trial.run_id and severity = 'warning') then 'warning'
            else 'healthy'
        end as value
    from orch_ledger.trials as trial
    where trial.id = any(%(trial_ids)s) and trial.state in ('finished', 'stopped', 'diverged')
),
wanted as (
    select said.run_id, said.key, said.value
    from (select * from found union all select * from judged) as said
    join public.runs as run on run.run_uuid = said.run_id
),
dropped as (
    delete from public.tags as tag
    using orch_ledger.trials as trial
    where trial.id = any(%(trial_ids)s) and tag.run_uuid = trial.run_id
        and (starts_with(tag.key, 'orch.finding.') or tag.key = 'orch.verdict')
        and not exists (select from wanted where wanted.run_id = tag.run_uuid and wanted.key = tag.key)
)
insert into public.tags as tag (run_uuid, key, value)
select run_id, key, value from wanted
order by run_id, key
on conflict (key, run_uuid) do update set value = excluded.value
where tag.value is distinct from excluded.value
"""

INSERT_FINDING = """
insert into orch_ledger.findings
    (sweep_id, trial_id, attempt, check_name, severity, step, value, threshold, message, advice)
values (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
on conflict do nothing
"""


INSERT_DECISION = """
insert into orch_ledger.decisions (sweep_id, trial_id, attempt, step, value, action, reason, source, params)
values (%s, %s, %s, %s, %s, %s, %s, %s, %s::jsonb)
on conflict do nothing
"""


INSERT_LOGS = """
insert into orch_ledger.logs (sweep_id, trial_id, attempt, stream, line_number, line, written_at)
select sweep_id, trial_id, attempt, stream, line_number, line, to_timestamp(written_at_ms / 1000.0)
from unnest(%s::int8[], %s::int8[], %s::int4[], %s::text[], %s::int8[], %s::text[], %s::int8[])
    as given (sweep_id, trial_id, attempt, stream, line_number, line, written_at_ms)
where sweep_id in (select id from orch_ledger.sweeps)
on conflict do nothing
"""


def _missing_runs(cursor: psycopg.Cursor[Any], run_ids: set[str]) -> frozenset[str]:
    cursor.execute(ACTIVE_RUNS, [sorted(run_ids)])
    return frozenset(run_ids.difference(run_id for (run_id,) in cursor))


def _insert_metrics(
    connection: psycopg.Connection[Any], cursor: psycopg.Cursor[Any], rows: Sequence[MetricRow]
) -> None:
    """COPY straight into the table is fastest, but knows no `on conflict`; only a replay needs the slower insert."""
    try:
        with connection.transaction(), cursor.copy(COPY_METRICS) as copy:
            for row in rows:
                copy.write_row(row)
    except psycopg.errors.UniqueViolation:
        cursor.execute(INSERT_METRICS, _columns(rows))


def _columns(rows: Sequence[MetricRow]) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)]


def _finding_values(row: FindingRow) -> tuple[Any, ...]:
    finding = row.finding
    return (
        *(row.sweep_id, row.trial_id, row.attempt, finding.check_name, finding.severity.value),
        *(finding.step, finding.value, finding.threshold, _text(finding.message), _text(finding.advice)),
    )


def _decision_values(row: DecisionRow) -> tuple[Any, ...]:
    decision = row.decision
    owner = (row.sweep_id, row.trial_id, row.attempt)
    told = (decision.step, decision.value, decision.action.value, _text(decision.reason), decision.source)
    return (*owner, *told, canonical_json(decision.params))


def _log_values(row: LogLine) -> tuple[Any, ...]:
    owner = (row.sweep_id, row.trial_id, row.attempt)
    return (*owner, row.stream, row.number, _text(row.text), row.written_at_ms)


def _text(words: str) -> str:
    """Postgres' text holds any Unicode but NUL and lone surrogates, which a quoted exception may well contain."""
    return words.encode("utf-8", "replace").decode("utf-8").replace("\0", "\N{REPLACEMENT CHARACTER}")
