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
    select experiment.experiment_id::text, experiment.artifact_location, sweep.name, sweep.id,
        sweep.heartbeat_at is not null,
        to_timestamp(experiment.last_update_time / 1000.0) < clock_timestamp() - make_interval(secs => %(older_than_s)s)
    from public.experiments as experiment
    join public.experiment_tags as tag on tag.experiment_id = experiment.experiment_id and tag.key = 'orch.sweep'
    left join orch_ledger.sweeps as sweep on sweep.experiment_id = experiment.experiment_id::text
    where experiment.lifecycle_stage = 'deleted'
        and (%(id)s::text is null or experiment.experiment_id::text = %(id)s)
    order by experiment.experiment_id
"""

ARCHIVED_SWEEPS = """
    select sweep.experiment_id, experiment.artifact_location, sweep.name, sweep.id,
        sweep.heartbeat_at is not null,
        sweep.archived_at < clock_timestamp() - make_interval(secs => %(older_than_s)s)
    from orch_ledger.sweeps as sweep
    left join public.experiments as experiment on experiment.experiment_id::text = sweep.experiment_id
    where sweep.archived_at is not null and coalesce(experiment.lifecycle_stage, '') <> 'deleted'
        and (%(id)s::text is null or sweep.experiment_id = %(id)s)
    order by sweep.id
"""

DELETED_RUNS = """
    select run.run_uuid, run.artifact_uri, sweep.name, sweep.id,
        sweep.heartbeat_at is not null,
        to_timestamp(run.deleted_time / 1000.0) < clock_timestamp() - make_interval(secs => %(older_than_s)s)
    from public.runs as run
    join public.tags as tag on tag.run_uuid = run.run_uuid and tag.key = 'orch.trial'
    join public.experiments as experiment on experiment.experiment_id = run.experiment_id
    left join orch_ledger.trials as trial on trial.run_id = run.run_uuid
    left join orch_ledger.sweeps as sweep on sweep.id = trial.sweep_id
    where run.lifecycle_stage = 'deleted' and experiment.lifecycle_stage = 'active'
        and (%(id)s::text is null or run.run_uuid = %(id)s)
    order by run.run_uuid
"""

STATES = """
    select trial.id, sweep.id, trial.state, run.artifact_uri,
        coalesce((sweep.spec ->> 'keep_checkpoints')::boolean, false)
    from orch_ledger.trials as trial
    join orch_ledger.sweeps as sweep on sweep.id = trial.sweep_id
    join public.runs as run on run.run_uuid = trial.run_id
    where trial.state <> all(%(unfinished)s) and sweep.heartbeat_at is null
        and (%(trial_id)s::bigint is null or trial.id = %(trial_id)s)
    order by trial.id
"""

OUR_LOCATIONS = """
    select experiment.artifact_location, sweep.id, sweep.heartbeat_at is not null
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

# Whoever takes the sweep waits for this row; where somebody is just taking it, this waits, and then finds none.
LOCK_UNDRIVEN = "select from orch_ledger.sweeps where id = %s and heartbeat_at is null for no key update"

FORGET_RUN = "update orch_ledger.trials set run_id = null where run_id = %s"


class Leftover(NamedTuple):
    """An experiment or a run that somebody deleted or archived."""

    id: str
    artifact_uri: str | None
    sweep: str | None
    sweep_id: int | None
    is_held: bool  # a command works on it
    is_old: bool


class States(NamedTuple):
    """What a trial that is over has saved, of a sweep that nobody drives."""

    trial_id: int
    sweep_id: int
    state: TrialState
    artifact_uri: str
    is_kept: bool  # on request


class Location(NamedTuple):
    """Where the artifacts of one of our experiments lie, also of a deleted one."""

    uri: str
    sweep_id: int | None
    is_held: bool


def leftovers(connection: Connection, query: str, older_than_s: float, only: str | None = None) -> list[Leftover]:
    """The rows of DELETED_EXPERIMENTS, ARCHIVED_SWEEPS or DELETED_RUNS, or the one with the id `only`."""
    rows = connection.execute(query.encode(), {"older_than_s": older_than_s, "id": only})
    return [Leftover(one, uri, name, sweep, held, bool(old)) for one, uri, name, sweep, held, old in rows]


def states(connection: Connection, trial_id: int | None = None) -> list[States]:
    """Those of all trials, or of one."""
    unfinished = [state.value for state in TrialState if state.is_unfinished]
    rows = connection.execute(STATES, {"unfinished": unfinished, "trial_id": trial_id})
    return [States(trial, sweep, TrialState(state), uri, is_kept) for trial, sweep, state, uri, is_kept in rows]


def our_locations(connection: Connection) -> list[Location]:
    return [Location(*row) for row in connection.execute(OUR_LOCATIONS) if row[0]]


def lock_undriven(connection: Connection, sweep_id: int) -> bool:
    """Keeps everybody from driving the sweep until the transaction ends. False, and no lock, where somebody does."""
    connection.execute("set local lock_timeout = '10s'")
    return connection.execute(LOCK_UNDRIVEN, (sweep_id,)).fetchone() is not None


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
