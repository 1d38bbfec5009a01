"""Runs, parameters, tags and experiments through MLflow's client on a real PostgreSQL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy

from orchestrator.database.connection import Database
from orchestrator.errors import AlreadyExists, NotFound, OrchError
from orchestrator.tracking import mlflow_schema
from orchestrator.tracking.artifacts import local_folder
from orchestrator.tracking.bulk import Points, rows_of, write_rows
from orchestrator.tracking.facts import git_facts, system_facts
from orchestrator.tracking.runs import Runs, param_text, run_artifact_uri
from orchestrator.trial import TrialState

# After ours: orchestrator.tracking sets MLflow's switches before MLflow loads.
from mlflow import MlflowClient  # isort: skip
from mlflow.environment_variables import MLFLOW_DISABLE_TELEMETRY  # isort: skip
from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH  # isort: skip

DatabaseOn = Callable[..., AbstractContextManager[str]]


@pytest.fixture(scope="module")
def url(server_url: str, database_on: DatabaseOn) -> Iterator[str]:
    with database_on(server_url) as url:
        mlflow_schema.create(url, "/nowhere/artifacts")
        yield url


@pytest.fixture(scope="module")
def runs(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    runs = Runs(url, tmp_path_factory.mktemp("artifacts").as_uri())
    yield runs
    runs.close()


@pytest.fixture(scope="module")
def client(url: str, runs: Runs) -> MlflowClient:
    """A plain MLflow client on the same database."""
    return MlflowClient(tracking_uri=mlflow_schema.mlflow_uri(url))


def ask(url: str, query: str, *values: object) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(query, values).fetchall()  # type: ignore[call-overload,no-any-return]


def new_run(runs: Runs, experiment_id: str, key: str = "1/1", **params: Any) -> str:
    return runs.create(experiment_id, key, "t-1", params, {})


# Schema


def test_mlflows_tables_lie_in_public_even_for_a_user_called_orch_with_a_percent_in_the_password(
    server_url: str, database_on: DatabaseOn, tmp_path: Path
) -> None:
    password = "p%40:/?#x%%y"
    owner = Database.from_url(server_url)
    with owner.connect(autocommit=True) as connection:
        connection.execute(psycopg.sql.SQL("create role orch login password {}").format(password))
    try:
        with database_on(server_url, owner="orch") as made:
            parameters = {**dict(Database.from_url(made).parameters), "user": "orch", "password": password}
            url = Database(tuple(sorted(parameters.items()))).url
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute("create schema orch")
            mlflow_schema.create(url, tmp_path.as_uri())
            mlflow_schema.create(url, tmp_path.as_uri())  # again: nothing to do
            tables = ask(url, "select schemaname, count(*) from pg_tables where tablename = 'runs' group by 1")
            assert tables == [("public", 1)]
            assert ask(url, "select version_num from public.alembic_version") == [(mlflow_schema.expected_revision(),)]
            runs = Runs(url, tmp_path.as_uri())
            assert new_run(runs, runs.get_or_create_experiment("t"))
            runs.close()
    finally:
        with owner.connect(autocommit=True) as connection:
            connection.execute("drop role orch")


def test_telemetry_is_off_unless_the_user_decides() -> None:
    assert MLFLOW_DISABLE_TELEMETRY.get() is True
    code = "import os, orchestrator.tracking; print(os.environ['MLFLOW_DISABLE_TELEMETRY'])"
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "false"}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["false"]


def test_recording_needs_no_mlflow() -> None:
    code = "import sys, orchestrator.tracking.recorder, orchestrator.tracking.facts; print('mlflow' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["False"]


# Experiments


def test_racing_processes_get_one_experiment_and_never_experiment_0(url: str, runs: Runs, tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from orchestrator.tracking.runs import Runs\n"
        "runs = Runs(sys.argv[1], sys.argv[2])\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "for number in range(20):\n"
        "    experiment_id = runs.get_or_create_experiment(f'race-{number}')\n"
        "    runs.create(experiment_id, f'9/{number}', 't', {}, {})\n"
        "    print(experiment_id, flush=True)\n"
    )
    command = [sys.executable, "-c", code, url, tmp_path.as_uri()]
    racers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    answers = [racer.communicate(timeout=60)[0].split() for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert answers[0] == answers[1]
    assert len(set(answers[0])) == 20
    assert ask(url, "select count(*) from public.runs where experiment_id = 0") == [(0,)]


def test_racing_threads_of_one_process_get_one_experiment(runs: Runs) -> None:
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(runs.get_or_create_experiment("threads"))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_a_foreign_experiment_is_never_taken(runs: Runs, client: MlflowClient) -> None:
    client.create_experiment("theirs")
    with pytest.raises(AlreadyExists, match="--name"):
        runs.get_or_create_experiment("theirs")
    foreign = client.get_experiment_by_name("theirs").experiment_id
    with pytest.raises(NotFound, match="not a sweep"):
        runs.purge_experiment(foreign)


def test_a_deleted_experiment_is_refused_with_two_ways_out_and_the_first_one_works(
    runs: Runs, client: MlflowClient, url: str
) -> None:
    experiment_id = runs.get_or_create_experiment("gone")
    client.delete_experiment(experiment_id)
    with pytest.raises(AlreadyExists) as caught:
        runs.get_or_create_experiment("gone")
    message = str(caught.value)
    assert f"mlflow experiments restore --experiment-id {experiment_id}" in message
    assert "--name NAME" in message
    password = dict(Database.from_url(url).parameters)["password"]
    assert password not in message
    assert "***" in message
    client.restore_experiment(experiment_id)
    assert runs.get_or_create_experiment("gone") == experiment_id


def test_an_archived_name_is_free_again_also_when_the_experiment_was_deleted(runs: Runs, client: MlflowClient) -> None:
    for number in range(2):
        experiment_id = runs.get_or_create_experiment("old")
        if number:
            client.delete_experiment(experiment_id)
        runs.archive_experiment(experiment_id, f"old~{number}")
        assert client.get_experiment(experiment_id).name == f"old~{number}"
    assert runs.get_or_create_experiment("old") not in ("0", experiment_id)
    with pytest.raises(NotFound):
        runs.archive_experiment("987654", "x")


def test_a_purged_experiment_leaves_no_row_and_no_file(runs: Runs, url: str) -> None:
    kept = new_run(runs, runs.get_or_create_experiment("kept"), "8/1", lr=1)
    experiment_id = runs.get_or_create_experiment("purged")
    run_ids = [new_run(runs, experiment_id, f"7/{number}", lr=0.1) for number in range(3)]
    for run_id in run_ids:
        runs.log_text(run_id, "text", "notes/a.txt")
        record(url, run_id, step=1)
    folder = local_folder(runs.artifact_uri(experiment_id, run_ids[0]))
    assert folder is not None
    assert (folder / "notes/a.txt").exists()
    runs.purge_experiment(experiment_id)
    for table in ("runs", "metrics", "latest_metrics", "params", "tags"):
        query = f"select count(*) from public.{table} where run_uuid = any(%s)"
        assert ask(url, query, run_ids) == [(0,)]
    assert not folder.parent.parent.exists()
    assert ask(url, "select count(*) from public.params where run_uuid = %s", kept) == [(1,)]
    assert runs.get_or_create_experiment("purged") != experiment_id
    with pytest.raises(NotFound):
        runs.purge_experiment(experiment_id)


def record(url: str, run_id: str, step: int, timestamp_ms: int = 1_000, value: float = 0.5) -> None:
    with psycopg.connect(url) as connection:
        write_rows(connection, rows_of([Points(run_id, 1, 1, step, timestamp_ms, {"loss": value})]))


# Runs


def test_a_run_has_its_params_and_tags_as_a_plain_client_sees_them(runs: Runs, client: MlflowClient) -> None:
    experiment_id = runs.get_or_create_experiment("params")
    params = {
        "lr": 1e-3, "tiny": 1e-05, "k": 2, "renormalize": True, "clip_norm": None, "top": float("inf"),
        "hidden": [300, 100], "opt.lr": 0.5, "note": "naïve", "empty": "",
    }  # fmt: skip
    run_id = runs.create(experiment_id, "5/3", "t-3", params, {"team": "router", "orch.sweep": "t"})
    data = client.get_run(run_id)
    assert data.data.params == {
        "lr": "0.001", "tiny": "1e-05", "k": "2", "renormalize": "true", "clip_norm": "null", "top": "inf",
        "hidden": "[300,100]", "opt.lr": "0.5", "note": "naïve", "empty": "",
    }  # fmt: skip
    assert data.data.tags["orch.trial"] == "5/3"
    assert data.data.tags["team"] == "router"
    assert data.info.status == "RUNNING"
    assert data.info.artifact_uri == runs.artifact_uri(experiment_id, run_id)


@pytest.mark.parametrize(("length", "layers"), [(6000, [1] * 2998 + [12]), (6001, [1] * 3000)])
def test_a_long_parameter_is_never_cut(runs: Runs, client: MlflowClient, length: int, layers: list[int]) -> None:
    assert len(param_text(layers)) == length
    experiment_id = runs.get_or_create_experiment("long")
    run_id = runs.create(experiment_id, f"6/{length}", "t", {"layers": layers, "lr": 0.1}, {})
    shown = client.get_run(run_id).data.params["layers"]
    folder = local_folder(runs.artifact_uri(experiment_id, run_id))
    assert folder is not None
    if length <= MAX_PARAM_VAL_LENGTH:
        assert shown == param_text(layers)
        assert not folder.exists()
    else:
        assert f"{length} characters, sha256" in shown
        assert json.loads((folder / "params.json").read_text()) == {"layers": layers, "lr": 0.1}


def test_more_parameters_than_one_batch_of_mlflow_holds(runs: Runs, client: MlflowClient) -> None:
    params = {f"p{index}": index for index in range(250)}
    run_id = new_run(runs, runs.get_or_create_experiment("many"), **params)
    assert client.get_run(run_id).data.params == {name: str(value) for name, value in params.items()}


def test_a_run_is_ended_and_reopened_with_the_status_of_its_state(runs: Runs, client: MlflowClient, url: str) -> None:
    run_id = new_run(runs, runs.get_or_create_experiment("fates"), lr=0.1)
    for state, status in (
        (TrialState.FINISHED, "FINISHED"),
        (TrialState.DIVERGED, "FINISHED"),
        (TrialState.FAILED, "FAILED"),
        (TrialState.KILLED, "KILLED"),
        (TrialState.LOST, "KILLED"),
    ):
        runs.terminate(run_id, state, reason="because", diverged_at=40 if state is TrialState.DIVERGED else None)
        run = client.get_run(run_id)
        assert (run.info.status, run.data.tags["orch.state"]) == (status, state.value)
        assert abs(run.info.end_time / 1000 - time.time()) < 60
    assert run.data.tags["orch.diverged_at"] == "40"
    record(url, run_id, step=0, timestamp_ms=1_000)
    record(url, run_id, step=9, timestamp_ms=2_500)

    not_before = runs.reopen(run_id, attempt=2)
    assert not_before is not None
    assert not_before.timestamp() == 2.501
    run = client.get_run(run_id)
    assert (run.info.status, run.info.end_time) == ("RUNNING", None)
    assert {"orch.reason", "orch.diverged_at"}.isdisjoint(run.data.tags)
    assert run.data.tags["orch.attempt"] == "2"
    record(url, run_id, step=0, timestamp_ms=9_000, value=0.25)
    assert client.get_run(run_id).data.metrics == {"loss": 0.25}
    assert len(client.get_metric_history(run_id, "loss")) == 3


def test_reopening_from_a_step_keeps_the_latest_values_before_it(runs: Runs, client: MlflowClient, url: str) -> None:
    run_id = new_run(runs, runs.get_or_create_experiment("steps"))
    assert runs.reopen(run_id, attempt=2) is None
    record(url, run_id, step=4)
    runs.reopen(run_id, attempt=3, first_step=5)
    assert client.get_run(run_id).data.metrics == {"loss": 0.5}


def test_a_run_that_mlflow_has_not_or_has_deleted_is_not_found(runs: Runs, client: MlflowClient) -> None:
    run_id = new_run(runs, runs.get_or_create_experiment("absent"))
    client.delete_run(run_id)
    for missing in (run_id, "0" * 32):
        with pytest.raises(NotFound):
            runs.terminate(missing, TrialState.FINISHED)
        with pytest.raises(NotFound):
            runs.reopen(missing, 2)


def test_adopting_finds_every_run_also_beyond_mlflows_page_of_1000(runs: Runs, url: str) -> None:
    experiment_id = runs.get_or_create_experiment("adopt")
    first = new_run(runs, experiment_id, "3/1")
    with psycopg.connect(url) as connection:
        for table, columns, values in (
            ("runs", "run_uuid, status, lifecycle_stage, experiment_id, start_time",
             f"lpad(n::text, 32, 'a'), 'RUNNING', 'active', {experiment_id}, 1"),
            ("tags", "run_uuid, key, value", "lpad(n::text, 32, 'a'), 'orch.trial', '3/' || n"),
        ):  # fmt: skip
            connection.execute(
                f"insert into public.{table} ({columns}) select {values} from generate_series(2, 1005) n"
            )
    found = runs.adopt(f"3/{number}" for number in range(1, 1010))
    assert len(found) == 1005
    assert found["3/1"] == first
    assert runs.adopt([]) == {}
    assert runs.adopt(["3/9999"]) == {}


def test_creating_and_ending_a_run_of_fifty_parameters_takes_few_round_trips(runs: Runs) -> None:
    """Statements, not seconds, because other work may share the machine; on an idle one they take about 20 ms."""
    experiment_id = runs.get_or_create_experiment("speed")
    params = {f"p{index}": index / 7 for index in range(50)}
    statements: list[str] = []

    def count(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement.split()[0].lower())

    engine = runs._store.engine
    sqlalchemy.event.listen(engine, "before_cursor_execute", count)
    try:
        run_id = runs.create(experiment_id, "4/1", "t", params, system_facts("orchestrator"))
        runs.terminate(run_id, TrialState.DIVERGED, reason="loss is nan at step 3", diverged_at=3)
    finally:
        sqlalchemy.event.remove(engine, "before_cursor_execute", count)
    assert Counter(statements) == {"select": 4, "insert": 4, "update": 1}


def test_one_connection_is_open_whatever_many_threads_ask(runs: Runs, url: str) -> None:
    experiment_id = runs.get_or_create_experiment("pool")
    keys = [f"2/{number}" for number in range(16)]
    threads = [threading.Thread(target=new_run, args=(runs, experiment_id, key), kwargs={"lr": 1}) for key in keys]
    query = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    peak = 0
    with psycopg.connect(url, autocommit=True) as watcher:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            peak = max([peak, *(row[0] for row in watcher.execute(query))])
    assert peak == 1
    assert len(runs.adopt(keys)) == 16


def test_a_run_below_a_very_long_folder_can_be_made_and_keeps_its_artifacts(
    url: str, tmp_path: Path, client: MlflowClient
) -> None:
    root = tmp_path / ("long" * 40)
    location = root.as_uri()[: 180 - 16 - 9] + "/.orch/artifacts"
    runs = Runs(url, location)
    experiment_id = runs.get_or_create_experiment("far")
    run_id = new_run(runs, experiment_id, lr=1)
    runs.log_text(run_id, "deep", "a.txt")
    assert client.get_run(run_id).info.artifact_uri == runs.artifact_uri(experiment_id, run_id)
    folder = local_folder(runs.artifact_uri(experiment_id, run_id))
    assert folder is not None
    assert (folder / "a.txt").read_text() == "deep"
    runs.purge_experiment(experiment_id)
    assert not folder.exists()
    with pytest.raises(OrchError, match="ORCH_ARTIFACT_ROOT"):
        Runs(url, location + "x" * 30).get_or_create_experiment("farther")


def test_artifacts_are_stored_under_the_name_given(runs: Runs, tmp_path: Path, client: MlflowClient) -> None:
    run_id = new_run(runs, runs.get_or_create_experiment("files"))
    (tmp_path / "weights.bin").write_bytes(b"\0\1")
    runs.log_file(run_id, tmp_path / "weights.bin")
    runs.log_file(run_id, tmp_path / "weights.bin", "checkpoints/last.bin")
    runs.log_text(run_id, "lone \ud800 surrogate", "error.txt")
    assert {item.path for item in client.list_artifacts(run_id)} == {"weights.bin", "checkpoints", "error.txt"}
    with pytest.raises(NotFound):
        runs.log_text("0" * 32, "x", "y.txt")


def test_artifact_addresses_fit_mlflows_column() -> None:
    assert run_artifact_uri("file:///a/b", "f" * 32) == f"file:///a/b/{'f' * 32}/artifacts"
    assert len(run_artifact_uri("file://" + "p" * 180, "f" * 32)) == 200


# Facts


def test_facts_name_versions_without_importing_and_the_commit_of_the_workloads_repository(tmp_path: Path) -> None:
    facts = system_facts("orchestrator")
    assert facts["orch.version.mlflow"].startswith("3.")
    assert int(facts["orch.memory_bytes"]) > 2**28
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab/model.py").write_text("x = 1\n")
    assert git_facts(tmp_path / "lab") == {}  # nothing tracked yet
    subprocess.run([*git, "add", "lab"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "m"], check=True)
    clean = git_facts(tmp_path / "lab")
    assert len(clean["orch.git_commit"]) == 40
    assert clean["orch.git_dirty"] == "false"
    (tmp_path / "lab/model.py").write_text("x = 2\n")
    assert git_facts(tmp_path / "lab")["orch.git_dirty"] == "true"
    assert "orch.git_commit" not in system_facts("no_such_package_here")
