"""A database of every earlier schema of ours is brought to this one with all its rows, and back again."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

from orchestrator import ledger
from orchestrator.database.connection import Database
from orchestrator.errors import DatabaseUnavailable
from orchestrator.workspace import open_workspace
from tests.conftest import DatabaseOn, workspace_on

REVISIONS = ["0001", "0002", "0003"]
TABLES = {
    "0001": ("sweeps", "trials", "attempts", "findings", "readers"),
    "0002": ("sweeps", "trials", "attempts", "findings", "readers"),
    "0003": ("sweeps", "trials", "attempts", "findings", "readers", "decisions"),
}
AT_MS = 1_767_232_800_000  # 2026-01-01 02:00 UTC, when the second attempt began
RUN = "0123456789abcdef0123456789abcdef"

MLFLOW_ROWS = f"""
insert into public.experiments (experiment_id, name, artifact_location, lifecycle_stage, creation_time,
    last_update_time, workspace)
values (7, 'old', 'file:///nowhere/old-abcdef', 'active', 1, 1, 'default');
insert into public.experiment_tags (key, value, experiment_id) values ('orch.sweep', 'old', 7);
insert into public.runs (run_uuid, name, status, start_time, lifecycle_stage, artifact_uri, experiment_id)
values ('{RUN}', 'old-0', 'FINISHED', 1, 'active', 'file:///nowhere/old-abcdef/{RUN}/artifacts', 7);
insert into public.metrics (key, value, timestamp, run_uuid, step, is_nan) values
    ('loss', 0.5, {AT_MS + 1000}, '{RUN}', 1, false), ('loss', 0, {AT_MS + 2000}, '{RUN}', 2, true);
insert into public.latest_metrics (key, value, timestamp, run_uuid, step, is_nan)
values ('loss', 0, {AT_MS + 2000}, '{RUN}', 2, true);
"""

LEDGER_ROWS = f"""
insert into orch_ledger.sweeps (name, workload, description, spec, source, columns, metric, mode, state, experiment_id,
    tags, started_at, ended_at)
values ('old', 'toy', 'a question', '{{"name": "old"}}', 'name: old', '[["lr", "double precision"]]', 'loss', 'min',
    'finished', '7', '{{"team": "router"}}', '2026-01-01', '2026-01-02'),
    ('cut', 'toy', '', '{{}}', '', '[]', 'loss', 'min', 'running', null, '{{}}', '2026-01-01', null),
    ('away~3', 'toy', '', '{{}}', '', '[]', 'loss', 'min', 'finished', null, '{{}}', '2026-01-01', '2026-01-02');
update orch_ledger.sweeps set archived_at = now() where name = 'away~3';
insert into orch_ledger.trials (sweep_id, number, params, config, config_hash, cell, sample, state, run_id, diverged_at,
    reason, error, objective, last_step, attempts, started_at, ended_at, host, device, git_commit)
select id, 0, '{{"lr": 0.1}}', '{{"lr": 0.1}}', 'h0', '{{"lr": 0.1}}', 3, 'diverged', '{RUN}', 2, 'loss is nan', '',
    'NaN', 2, 2, '2026-01-01', '2026-01-02', 'there', 'cpu', 'c0ffee' from orch_ledger.sweeps where name = 'old';
insert into orch_ledger.trials (sweep_id, number, params, config, config_hash, cell, state)
select sweep.id, trial.number, '{{}}', '{{}}', 'h' || trial.number, '{{}}', trial.state
from orch_ledger.sweeps as sweep, (values (0, 'running'), (1, 'waiting')) as trial (number, state)
where sweep.name = 'cut';
insert into orch_ledger.attempts (trial_id, number, state, started_at, first_step, ended_at, host, pid, failure, error,
    seconds)
select trial.id, try.number, try.state, '2026-01-01 00:00Z'::timestamptz + try.number * interval '1 hour',
    try.number - 1, '2026-01-02', 'there', 42, try.failure, try.error, 1.5
from orch_ledger.trials as trial, (values (1, 'lost', 'worker', 'gone'), (2, 'diverged', '', '')) as try
    (number, state, failure, error)
where trial.run_id is not null;
insert into orch_ledger.findings (sweep_id, trial_id, attempt, check_name, severity, step, value, threshold, message,
    advice)
select sweep_id, id, 2, 'loss', 'error', 2, 'NaN', 1, 'it is nan', 'lower lr' from orch_ledger.trials
where run_id is not null;
insert into orch_ledger.readers (role, verifier) values ('a_role', 'a verifier');
"""

DECISION = """
insert into orch_ledger.decisions (sweep_id, trial_id, attempt, step, value, action, reason, source, params)
select sweep_id, id, 1, 1, 0.5, 'continue', 'in the upper half', null, '{"lr": 0.2}' from orch_ledger.trials
where run_id is not null;
update orch_ledger.trials set more_objectives = '{1,NaN,null}' where run_id is not null;
"""


@pytest.fixture(scope="module")
def with_mlflow(server_url: str, database_on: DatabaseOn) -> Iterator[Database]:
    """MLflow's tables and nothing of ours, to be copied."""
    from orchestrator.tracking import mlflow_schema

    with database_on(server_url) as url:
        mlflow_schema.create(url, "file:///nowhere")
        yield Database.from_url(url)


@contextmanager
def copy_of(template: Database) -> Iterator[Database]:
    server, name = template.beside("postgres"), f"t_{secrets.token_hex(6)}"
    with server.connect(autocommit=True) as connection:
        connection.execute(f"create database {name} template {template.name}")
    yield server.beside(name)
    with server.connect(autocommit=True) as connection:
        connection.execute(f"drop database {name} with (force)")


@pytest.fixture
def fresh(with_mlflow: Database) -> Iterator[Database]:
    with copy_of(with_mlflow) as database:
        yield database


def alembic(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(ledger.MIGRATIONS))
    config.attributes["connection"] = connection
    return config


def make_old(database: Database, revision: str) -> None:
    """The database as an orch of that revision left it, with rows in every table."""
    engine = database.engine("orch-tests")
    with engine.begin() as connection:
        connection.exec_driver_sql("create schema orch_ledger")
        command.upgrade(alembic(connection), revision)
    engine.dispose()
    with database.connect() as connection:
        connection.execute("create table orch_ledger.meta (key text primary key, value text not null)")
        connection.execute("insert into orch_ledger.meta values ('identity', 'who it is'), ('fingerprint', 'older')")
        connection.execute(MLFLOW_ROWS.encode())
        connection.execute(LEDGER_ROWS.encode())
        if revision >= "0003":
            connection.execute(DECISION.encode())


def rows(database: Database, table: str) -> list[dict[str, Any]]:
    with database.connect() as connection:
        order = "role" if table == "readers" else "id"
        query = f"select to_jsonb(one) from orch_ledger.{table} as one order by {order}"
        return [row for (row,) in connection.execute(query.encode())]


def ask(database: Database, query: str) -> list[tuple[Any, ...]]:
    with database.connect() as connection:
        return connection.execute(query.encode()).fetchall()


@dataclass(frozen=True)
class Upgraded:
    """A database at head, the revision it came from, and the rows it had there."""

    revision: str
    database: Database
    before: dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=REVISIONS)
def upgraded(
    request: pytest.FixtureRequest, with_mlflow: Database, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Upgraded]:
    with copy_of(with_mlflow) as database:
        make_old(database, request.param)
        before = {table: rows(database, table) for table in TABLES[request.param]}
        assert all(before.values()), "every table has rows"
        workspace_on(database.url, tmp_path_factory.mktemp("upgraded") / ".orch")
        yield Upgraded(request.param, database, before)


def test_an_older_database_keeps_every_row_and_its_views_are_right(upgraded: Upgraded) -> None:
    database, before = upgraded.database, upgraded.before
    assert ask(database, "select version_num from orch_ledger.alembic_version") == [(ledger.HEAD,)]
    for table, old in before.items():
        kept = [row for row in rows(database, table) if table != "readers" or row["role"] == "a_role"]
        given = {"sweeps": ("holder", "heartbeat_at")}.get(table, ())
        assert [{name: row[name] for name in one if name not in given} for one, row in zip(old, kept, strict=True)] == [
            {name: value for name, value in one.items() if name not in given} for one in old
        ]
    assert ask(database, "select value from orch_ledger.meta where key = 'identity'") == [("who it is",)]
    assert ask(database, "select sweep, state, trials, diverged from orch.sweeps order by 1") == [
        ("cut", "running", 2, 0),
        ("old", "finished", 1, 1),
    ]
    runs = "select trial, state, verdict, diverged_at, attempts, params from orch.runs where sweep = 'old'"
    assert ask(database, runs) == [(0, "diverged", "diverged", 2, 2, {"lr": 0.1})]
    points = ask(database, f"select step, value from orch.metrics where run_id = '{RUN}' order by step")
    assert points[0] == (1, 0.5)
    assert points[1][0] == 2
    assert math.isnan(points[1][1]), "MLflow's table has 0 there"
    assert ask(database, "select trial, lr, diverged from orch.sweep_old") == [(0, 0.1, True)]
    assert ask(database, "select check_name, message from orch.findings") == [("loss", "it is nan")]


def test_what_ran_when_an_older_orch_was_replaced_is_given_to_the_reaper(upgraded: Upgraded) -> None:
    database = upgraded.database
    held = "select name, holder from orch_ledger.sweeps where heartbeat_at is not null"
    assert ask(database, held) == [("cut", "a command of an older orch")]


def test_a_downgrade_keeps_the_rows_of_the_older_schema_and_the_way_up_is_open_again(upgraded: Upgraded) -> None:
    database, before = upgraded.database, upgraded.before
    engine = database.engine("orch-tests")
    with engine.begin() as connection:
        connection.exec_driver_sql("drop schema orch cascade")  # views stand on columns that go
        command.downgrade(alembic(connection), upgraded.revision)
    after = {table: rows(database, table) for table in before}
    after["readers"] = [row for row in after["readers"] if row["role"] == "a_role"]
    assert after == before
    with engine.connect() as connection:
        ledger.upgrade(connection)
        assert ledger.revision(connection) == ledger.HEAD
    engine.dispose()


def test_of_four_first_commands_after_an_upgrade_of_orch_one_migrates_and_all_work(
    fresh: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_old(fresh, "0001")
    monkeypatch.setenv("ORCH_DATABASE_URL", fresh.url)
    with ThreadPoolExecutor(4) as commands:  # the lock that keeps them apart is the database's
        opened = [commands.submit(open_workspace, tmp_path / ".orch") for _ in range(4)]
    answers = [one.result().query("select count(*) from orch.sweeps")[1] for one in opened]
    assert answers == [[(2,)]] * 4


def test_a_ledger_of_a_newer_orch_is_refused_and_left_as_it_is(
    fresh: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_old(fresh, "0003")
    with fresh.connect() as connection:
        connection.execute("update orch_ledger.alembic_version set version_num = '9999'")
    before = {table: rows(fresh, table) for table in TABLES["0003"]}
    monkeypatch.setenv("ORCH_DATABASE_URL", fresh.url)
    with pytest.raises(DatabaseUnavailable, match=r"revision 9999; .* install a newer orch"):
        open_workspace(tmp_path / ".orch")
    assert {table: rows(fresh, table) for table in TABLES["0003"]} == before
    with pytest.raises(psycopg.errors.UndefinedTable):
        ask(fresh, "select 1 from orch.sweeps")
