"""`orch ui` as a person meets it: two addresses that answer, one clear line when not, nothing left behind."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import psycopg
import pytest
from playwright.sync_api import expect

from orchestrator import serve
from orchestrator.errors import OrchError

ROOT = Path(__file__).parents[2]
ORCH = [sys.executable, "-m", "orchestrator.cli"]


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=20) as answer:
        body: bytes = answer.read()
        return body


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def left_of(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that live on; a moment is given to whoever was just killed, and a zombie waits for its reaper only."""
    _, alive = psutil.wait_procs(processes, timeout=3)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_mlflows_page_shows_the_run_its_parameters_and_its_artifacts(page_lab: Any, ui: Any, watched: Any) -> None:
    run_id = page_lab.run_ids[2]
    experiment_id = page_lab.ledger.find_sweep("lab").experiment_id
    watched.page.goto(f"{ui.mlflow}/#/experiments/{experiment_id}/runs/{run_id}")
    wrong = watched.page.get_by_text("Something went wrong")
    expect(watched.page.get_by_role("heading", name="lab-2").or_(wrong).first).to_be_visible()
    assert wrong.count() == 0, watched.errors
    expect(watched.page.get_by_text("c_z", exact=True).first).to_be_visible()
    # MLflow asks who is logged in, and without its login plug-in answers itself with 404.
    assert [error for error in watched.errors if "/users/current" not in error] == []
    assert watched.blocked == []

    run = json.loads(get(f"{ui.mlflow}/api/2.0/mlflow/runs/get?run_id={run_id}"))["run"]
    assert {param["key"]: param["value"] for param in run["data"]["params"]} == {"c_z": "0.0", "k": "2", "seed": "0"}
    listing = json.loads(get(f"{ui.mlflow}/api/2.0/mlflow/artifacts/list?run_id={page_lab.run_ids[0]}"))
    assert [file["path"] for file in listing["files"]] == ["note.txt"]
    assert get(f"{ui.mlflow}/get-artifact?path=note.txt&run_id={page_lab.run_ids[0]}") == b"a note"


def test_no_password_is_on_a_command_line_or_in_a_log_and_the_connections_are_few(page_lab: Any, ui: Any) -> None:
    password = dict(page_lab.database.parameters)["password"]
    for process in descendants(ui.process.pid):
        assert password not in " ".join(process.cmdline())
        assert "ORCH_DATABASE_URL" not in process.environ()
    for name in ("mlflow", "dashboards"):
        assert password not in (page_lab.home.path / "logs" / f"{name}.log").read_text()
    with page_lab.database.connect("orch-tests") as connection:
        query = "select count(*) from pg_stat_activity where datname = current_database() and application_name = %s"
        [[num_connections]] = connection.execute(query, [serve.MLFLOW_SESSION]).fetchall()
    assert 1 <= num_connections <= 4


def test_both_servers_and_all_their_workers_listen_on_loopback_only(ui: Any) -> None:
    family = descendants(ui.process.pid)
    listening = [
        one.laddr for process in family for one in process.net_connections() if one.status == psutil.CONN_LISTEN
    ]
    assert {urlsplit(ui.mlflow).port, urlsplit(ui.dashboards).port} <= {address.port for address in listening}
    assert {address.ip for address in listening} == {"127.0.0.1"}


def test_ctrl_c_stops_both_with_their_workers_and_leaves_the_database_up(page_lab: Any, ui_on: Any) -> None:
    with ui_on(page_lab, "--host", "0.0.0.0") as running:
        assert "every address" in running.output
        assert get(f"{running.mlflow}/health") == b"OK"
        assert get(f"{running.dashboards}/health")
        children = descendants(running.process.pid)
        assert len(children) >= 3  # MLflow, its worker, marimo
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(timeout=15) == 0
        assert running.process.stderr.read() == ""
        assert left_of(children) == []
    with psycopg.connect(page_lab.database.url) as connection:
        assert connection.execute("select 1").fetchone() == (1,)


@pytest.mark.parametrize("offset", [0, 1])
def test_an_occupied_port_is_one_line_and_exit_2(offset: int, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        done = subprocess.run(
            [*ORCH, "--home", str(tmp_path / ".orch"), "ui", "--port", str(port - offset)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(rf"--port  127\.0\.0\.1:{port} cannot be used \(Address already in use\).*\n", done.stderr)
    assert not (tmp_path / ".orch").exists()  # not even the database was started


def server_of(code: str, tmp_path: Path) -> serve.Server:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return serve.Server("toy", [sys.executable, "-c", code], {}, "127.0.0.1", port, "/", tmp_path / "toy.log")


def test_a_server_that_does_not_start_is_named_with_its_last_words_and_its_log(tmp_path: Path) -> None:
    server = server_of("raise SystemExit('no module named x')", tmp_path)
    with serve.stop_request() as stop, serve._running([server]) as [child]:
        with pytest.raises(OrchError) as error:
            serve._is_up(child, stop)
    assert str(error.value) == f"toy did not start (exit code 1): no module named x\nread {tmp_path}/toy.log"


def test_a_server_that_dies_later_ends_the_command_with_1_and_names_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = server_of("print('out of memory'); raise SystemExit(9)", tmp_path)
    with serve.stop_request() as stop, serve._running([server]) as children:
        assert serve._wait(children, stop) == 1
    assert capsys.readouterr().err == f"toy ended with exit code 9: out of memory\nread {tmp_path}/toy.log\n"


def test_a_worker_that_outlives_its_parent_is_stopped_too(tmp_path: Path) -> None:
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    worker = f"import signal, time; {deaf}; print('deaf', flush=True); time.sleep(60)"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {worker!r}]).wait()"
    server = server_of(code, tmp_path)
    with serve._running([server]) as [started]:
        while not (tmp_path / "toy.log").read_text():
            assert started.process.poll() is None
        [child] = descendants(started.process.pid)
    assert left_of([child]) == []


def test_the_dashboards_folder_is_part_of_the_installation() -> None:
    assert importlib.util.find_spec("dashboards") is not None
    assert serve._app_file().name == "overview.py"
