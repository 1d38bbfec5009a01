"""What housekeeping asks the ledger beside MLflow's tables, and the marks it sets. Deletes no sweep: `purge` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import psycopg
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex

from orchestrator.ledger.lease import HELD, Holder, Marker, holder_of, strike
from orchestrator.ledger.models import Base, SweepState
from orchestrator.trial import TrialState

Connection = psycopg.Connection[Any]

# Only what carries our tag. `is_old` is by the database's clock; MLflow's times are milliseconds.
DELETED_EXPERIMENTS = """
    select experiment.experiment_id::text, experiment.artifact_location, sweep.name,
        sweep.heartbeat_at is not null,
        to_timestamp(experiment.last_update_time / 1000.0) < clock_timestamp() - make_interval(secs => %(older_than_s)s)
    from public.experiments as experiment
    join public.experiment_tags as tag on tag.experiment_id = experiment.experiment_id and tag.key = 'orch.sweep'
    left join orch_ledger.sweeps as sweep on sweep.experiment_id = experiment.experiment_id::text
    where experiment.lifecycle_stage = 'deleted'
    order by experiment.experiment_id
"""

ARCHIVED_SWEEPS = """
    select sweep.experiment_id, experiment.artifact_location, sweep.name,
        sweep.heartbeat_at is not null,
        sweep.archived_at < clock_timestamp() - make_interval(secs => %(older_than_s)s)
    from orch_ledger.sweeps as sweep
    left join public.experiments as experiment on experiment.experiment_id::text = sweep.experiment_id
    where sweep.archived_at is not null and coalesce(experiment.lifecycle_stage, '') <> 'deleted'
    order by sweep.id
"""

DELETED_RUNS = """
    select run.run_uuid, run.artifact_uri, null,
        sweep.heartbeat_at is not null,
        to_timestamp(run.deleted_time / 1000.0) < clock_timestamp() - make_interval(secs => %(older_than_s)s)
    from public.runs as run
    join public.tags as tag on tag.run_uuid = run.run_uuid and tag.key = 'orch.trial'
    join public.experiments as experiment on experiment.experiment_id = run.experiment_id
    left join orch_ledger.trials as trial on trial.run_id = run.run_uuid
    left join orch_ledger.sweeps as sweep on sweep.id = trial.sweep_id
    where run.lifecycle_stage = 'deleted' and experiment.lifecycle_stage = 'active'
    order by run.run_uuid
"""

STATES = """
    select trial.state, run.artifact_uri, coalesce((sweep.spec ->> 'keep_checkpoints')::boolean, false)
    from orch_ledger.trials as trial
    join orch_ledger.sweeps as sweep on sweep.id = trial.sweep_id
    join public.runs as run on run.run_uuid = trial.run_id
    where trial.state <> all(%s) and sweep.heartbeat_at is null
    order by trial.id
"""

OUR_LOCATIONS = """
    select experiment.artifact_location, sweep.heartbeat_at is not null
    from public.experiments as experiment
    join public.experiment_tags as tag on tag.experiment_id = experiment.experiment_id and tag.key = 'orch.sweep'
    left join orch_ledger.sweeps as sweep on sweep.experiment_id = experiment.experiment_id::text
    order by experiment.experiment_id
"""

# A run's folder has its id for a name, or the first 12 digits of it. Whatever an address names is known as well, also
# that of an experiment whose tag somebody took away.
UNKNOWN = """
    with known (name) as (
        select run_uuid from public.runs
        union all select left(run_uuid, 12) from public.runs
        union all select unnest(string_to_array(artifact_uri, '/')) from public.runs
        union all select unnest(string_to_array(artifact_location, '/')) from public.experiments
        union all select run_id from orch_ledger.trials
        union all select left(run_id, 12) from orch_ledger.trials
    )
    select folder.name from unnest(%s::text[]) as folder (name)
    where not exists (select from known where known.name = folder.name)
"""

# A holder whose trials the reaper marked, and whose sweep nobody has taken since.
ABANDONED = """
    select sweep.name, sweep.holder, count(trial.id) filter (where trial.state = 'lost')
    from orch_ledger.sweeps as sweep
    left join orch_ledger.trials as trial on trial.sweep_id = sweep.id
    where sweep.holder <> '' and sweep.heartbeat_at is null and sweep.archived_at is null
    group by sweep.id
    order by sweep.id
"""

FORGET_RUN = "update orch_ledger.trials set run_id = null where run_id = %s"


class Leftover(NamedTuple):
    """An experiment or a run that somebody deleted or archived."""

    id: str
    artifact_uri: str | None
    sweep: str | None
    is_held: bool  # a command works on it
    is_old: bool


def leftovers(connection: Connection, query: str, older_than_s: float) -> list[Leftover]:
    """The rows of DELETED_EXPERIMENTS, ARCHIVED_SWEEPS or DELETED_RUNS."""
    rows = connection.execute(query.encode(), {"older_than_s": older_than_s})
    return [Leftover(one, uri, sweep, held, bool(old)) for one, uri, sweep, held, old in rows]


def states(connection: Connection) -> list[tuple[TrialState, str, bool]]:
    """(state, artifact URI, keeps its checkpoints on request) of every trial that is over and whose sweep nobody
    drives.
    """
    unfinished = [state.value for state in TrialState if state.is_unfinished]
    rows = connection.execute(STATES, (unfinished,))
    return [(TrialState(state), uri, is_kept) for state, uri, is_kept in rows]


def our_locations(connection: Connection) -> dict[str, bool]:
    """Where the artifacts of our experiments lie, deleted ones included -> whether a command works on the sweep."""
    return {location: held for location, held in connection.execute(OUR_LOCATIONS) if location}


def unknown(connection: Connection, names: Sequence[str]) -> set[str]:
    """Those of the names of folders that neither MLflow nor the ledger knows; they know what is only marked deleted."""
    return {name for (name,) in connection.execute(UNKNOWN, (list(names),))}


def forget_run(connection: Connection, run_id: str) -> None:
    """A trial whose run is gone for good has none: should it train again, it gets another."""
    connection.execute(FORGET_RUN, (run_id,))


def abandoned(connection: Connection) -> list[tuple[str, str, int]]:
    """(sweep, who drove it, number of lost trials) where a command died and nobody went on."""
    return [(name, holder, num_lost) for name, holder, num_lost in connection.execute(ABANDONED)]


def driven(connection: Connection) -> list[Holder]:
    """The sweeps that a command drives now, with that command."""
    return [holder for row in connection.execute(HELD) if not (holder := holder_of(row)).is_stale]


def index_statements() -> dict[str, str]:
    """The ledger's indexes: name -> the statement that makes it."""
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    indexes = [index for table in Base.metadata.sorted_tables for index in table.indexes]
    return {str(one.name): " ".join(str(CreateIndex(one).compile(dialect=dialect)).split()) for one in indexes}


def strike_all(connection: Connection, reason: str, mark_runs: Marker) -> int:
    """Marks what every holder has running as lost, alive or not: in a copy of a database nobody holds anything.

    Returns how many sweeps that were.
    """
    holders = [holder_of(row) for row in connection.execute(HELD)]
    for holder in holders:
        strike(connection, holder, TrialState.LOST, SweepState.INTERRUPTED, reason, mark_runs)
    return len(holders)
