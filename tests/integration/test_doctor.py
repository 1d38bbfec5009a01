"""`orch doctor` finds what is planted, names the remedy, and is quiet about the rest."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from orchestrator.errors import ResourceError
from orchestrator.execution.ray_tune.reachable import refuse_silent_address
from orchestrator.ledger.leftovers import index_statements
from orchestrator.settings import Settings, remote_journal_folder
from orchestrator.tracking.indexes import NEEDED
from orchestrator.tracking.journal import Journal
from tests.conftest import DatabaseOn, Orch, free_port


class Patient:
    """A workspace on a database of its own."""

    def __init__(self, orch: Orch, url: str, folder: Path) -> None:
        self.url, self.home = url, folder / ".orch"
        self.orch = Orch({**orch.env, "ORCH_HOME": str(self.home), "ORCH_DATABASE_URL": url}, folder)
        self.orch("status")

    def execute(self, *statements: str) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement)

    def lines(self, expect: int = 0) -> dict[str, dict[str, str]]:
        return {line["check"]: line for line in json.loads(self.orch("doctor", "--format", "json", expect=expect).out)}


@pytest.fixture(scope="module")
def patient(
    orch: Orch, server_url: str, database_on: DatabaseOn, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Patient]:
    with database_on(server_url) as url:
        yield Patient(orch, url, tmp_path_factory.mktemp("patient"))


def test_a_healthy_workspace_has_nothing_wrong_and_shows_what_was_looked_at(patient: Patient) -> None:
    lines = patient.lines()
    assert {line["check"] for line in lines.values() if line["state"] == "wrong"} == set()
    looked_at = {"disk (journal)", "open files", "sockets", "devices", "packages", "connections", "clock", "journal"}
    assert looked_at <= set(lines)
    revision = lines["schema (ledger)"]["what"]
    assert revision.split(", expected ")[0] == revision.split(", expected ")[1]
    assert lines["indexes"]["what"].startswith(f"all {len(NEEDED) + len(index_statements())} ")


def test_missing_indexes_are_named_and_the_printed_statements_mend_them(patient: Patient) -> None:
    patient.execute(
        "drop index public.index_metrics_run_uuid_key_step",
        "drop index orch_ledger.logs_replay_key",
        "alter table public.tags drop constraint tag_pk",
    )
    line = patient.lines(expect=1)["indexes"]
    assert line["state"] == "wrong"
    assert line["what"] == "missing or broken: index_metrics_run_uuid_key_step, logs_replay_key, tag_pk"
    patient.execute(*line["remedy"].removeprefix("in psql: ").split("; "))
    assert patient.lines()["indexes"]["state"] == "ok"


def test_the_indexes_that_are_looked_for_are_those_of_mlflows_own_models(patient: Patient) -> None:
    from mlflow.store.tracking.dbmodels.models import SqlLatestMetric, SqlMetric, SqlParam, SqlRun, SqlTag

    import orchestrator.tracking  # noqa: F401  (sets MLflow's switches before MLflow loads)

    tables = [model.__table__ for model in (SqlLatestMetric, SqlMetric, SqlParam, SqlRun, SqlTag)]
    columns = {index.name: [column.name for column in index.columns] for one in tables for index in one.indexes}
    columns |= {one.primary_key.name: [column.name for column in one.primary_key.columns] for one in tables}
    written = {name: text.rpartition("(")[2].rstrip(")").split(", ") for name, text in NEEDED.items()}
    assert written == columns


def test_what_a_dead_command_left_is_told_with_the_way_to_go_on(patient: Patient) -> None:
    name = "from orchestrator.ledger.process import this_process; print(this_process())"
    dead = subprocess.run([sys.executable, "-c", name], capture_output=True, text=True, check=True).stdout.strip()
    patient.execute(
        "insert into orch_ledger.sweeps (id, name, workload, spec, metric, mode, state, holder, holder_process, "
        f"heartbeat_at) values (77, 'left', 'w', '{{}}', 'm', 'min', 'running', '4242@here', '{dead}', now())",
        "insert into orch_ledger.trials (sweep_id, number, params, config, config_hash, cell, state) "
        "values (77, 0, '{}', '{}', 'h', '{}', 'running')",
    )
    line = patient.lines()["sweep left"]
    assert line["what"] == "its command 4242@here died; 1 trials are lost"
    assert line["remedy"] == "orch resume left"
    patient.execute("delete from orch_ledger.sweeps where id = 77")


def test_points_that_wait_in_a_journal_are_told_with_their_host_and_for_whom(patient: Patient) -> None:
    with psycopg.connect(patient.url) as connection:
        row = connection.execute("select value from orch_ledger.meta where key = 'identity'").fetchone()
    assert row is not None
    of_a_node = remote_journal_folder(Settings()) / row[0]
    for folder in (
        patient.home / "journal" / row[0],
        of_a_node,
        patient.home / "journal" / f"{0:08}-0000-4000-8000-{0:012}",
    ):
        journal = Journal.create(folder)
        journal.append([{"a": "point"}])
        journal.close()
    for number, text in enumerate(("", '{"pid": 1', "[1]", '{"pid": 1}')):
        (patient.home / f"notes{number}.json").write_text(text)  # the person's own, or torn
    try:
        out = patient.orch("doctor").out
    finally:
        shutil.rmtree(of_a_node)
    waiting = [line for line in out.splitlines() if line.startswith("journal ")]
    assert len(waiting) == 3
    assert sum("the next sweep on this host writes it" in line for line in waiting) == 2
    assert sum("for another database: run orch with that one" in line for line in waiting) == 1


def test_it_answers_within_three_seconds_and_imports_none_of_the_heavy_libraries(patient: Patient) -> None:
    code = (
        "import sys, time, psutil; from pathlib import Path; from orchestrator.doctor import examine\n"
        f"examine(Path({str(patient.home)!r}), False)\n"
        "print(sum(psutil.Process().cpu_times()[:2]), [m for m in ('torch', 'ray', 'mlflow') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **patient.orch.env}, capture_output=True, text=True, check=True
    )
    cpu_s, heavy = done.stdout.strip().split(" ", 1)
    assert heavy == "[]"
    assert float(cpu_s) < 3  # of processor time: the wall clock says nothing on a loaded machine


def test_a_head_that_is_the_last_to_listen_is_waited_for_and_one_that_never_does_is_named() -> None:
    port = free_port()
    with pytest.raises(ResourceError, match=rf"127.0.0.1:{port}  no Ray cluster answers \(Connection refused\)"):
        refuse_silent_address(f"127.0.0.1:{port}", patience_s=0.1)
    with socket.socket() as head:
        head.bind(("127.0.0.1", port))
        listening = threading.Timer(0.2, head.listen)
        listening.start()
        refuse_silent_address(f"127.0.0.1:{port}", patience_s=30.0)
        listening.join()
