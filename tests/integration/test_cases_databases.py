"""`orch` on databases that are not ready for it: other tables, another revision, two first sweeps at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.database.connection import Database
from tests.conftest import DatabaseOn, Orch

QUICK = """
    workload: orch_lab:Trivial
    metric: {name: val/loss, mode: min}
    params: {x: {grid: [0, 1]}, steps: 2}
"""


@pytest.fixture
def given(orch: Orch, server_url: str, database_on: DatabaseOn, tmp_path: Path) -> Iterator[Orch]:
    """`orch` on an empty database of its own, named by ORCH_DATABASE_URL."""
    with database_on(server_url) as url:
        env = {**orch.env, "ORCH_DATABASE_URL": url, "ORCH_HOME": str(tmp_path / ".orch")}
        yield Orch(env, tmp_path)


def execute(given: Orch, statement: str) -> None:
    with Database.from_url(given.env["ORCH_DATABASE_URL"]).connect("orch-tests", autocommit=True) as connection:
        connection.execute(statement)


def one(given: Orch, query: str) -> object:
    with Database.from_url(given.env["ORCH_DATABASE_URL"]).connect("orch-tests", autocommit=True) as connection:
        row = connection.execute(query).fetchone()
        assert row is not None
        return row[0]


def test_somebody_elses_tables_are_left_alone_until_doctor_is_told_to_add_ours(given: Orch) -> None:
    execute(given, "create table customers (id int)")
    file = given.sweep_file(QUICK, "first")
    refused = given("sweep", file, "--inline", expect=2)
    assert "orch doctor --init" in refused.err
    ill = given("doctor", expect=1)
    assert "orch doctor --init" in ill.out
    assert one(given, "select count(*) from information_schema.tables where table_schema = 'public'") == 1
    assert "wrong" not in given("doctor", "--init").out
    given("sweep", file, "--inline")
    checks = {row["check"]: row for row in json.loads(given("doctor", "--format", "json").out)}
    assert all(row["state"] in ("ok", "note") for row in checks.values())
    assert checks["psql"]["what"].startswith("psql 'postgresql://orchestrator@")
    assert checks["views"]["what"] == "1 sweeps"


def test_mlflows_schema_at_another_revision_is_refused_with_the_command_and_never_upgraded(given: Orch) -> None:
    given("up", "--no-ui")
    expected = one(given, "select version_num from public.alembic_version")
    execute(given, "update public.alembic_version set version_num = '0a1b2c3d4e5f'")
    refused = given("sweep", given.sweep_file(QUICK, "t"), "--inline", expect=2)
    assert f"at revision 0a1b2c3d4e5f, the installed MLflow expects {expected}" in refused.err
    assert "mlflow db upgrade" in refused.err
    assert ":***@" in refused.err
    assert str(dict(Database.from_url(given.env["ORCH_DATABASE_URL"]).parameters)["password"]) not in refused.err
    assert one(given, "select version_num from public.alembic_version") == "0a1b2c3d4e5f"
    assert one(given, "select count(*) from orch_ledger.sweeps") == 0


def test_first_sweeps_at_once_on_a_fresh_database_share_no_name_and_never_fall_into_experiment_0(given: Orch) -> None:
    text = QUICK.replace("steps: 2", "steps: 20, sleep_s: 0.05") + "    log_every: 1\n"
    same, other = given.sweep_file(text, "same"), given.sweep_file(text, "other")
    processes = [given.start_warm("sweep", file, "--inline") for file in (same, same, other)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [processes[2].returncode, *sorted(process.returncode for process in processes[:2])] == [0, 0, 2], outputs
    loser = outputs[[process.returncode for process in processes].index(2)]
    assert "Traceback" not in loser
    assert "same" in loser
    assert one(given, "select count(*) from public.runs where experiment_id = 0") == 0
    assert one(given, "select count(*) from public.runs where status = 'FINISHED'") == 4
    assert given.rows("select sweep, finished from sweeps order by 1") == [
        {"sweep": "other", "finished": 2},
        {"sweep": "same", "finished": 2},
    ]


def test_a_tracking_uri_of_something_else_is_said_once_and_not_used(given: Orch, tmp_path: Path) -> None:
    elsewhere = Orch({**given.env, "MLFLOW_TRACKING_URI": str(tmp_path / "mlruns")}, tmp_path)
    done = elsewhere("sweep", elsewhere.sweep_file(QUICK, "t"), "--inline")
    assert done.err.count("MLFLOW_TRACKING_URI is set; orch does not use it") == 1
    assert not (tmp_path / "mlruns").exists()
    assert one(given, "select count(*) from public.runs") == 2
