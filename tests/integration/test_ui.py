"""`orch ui` as a person meets it: two addresses that answer, one clear line when not, nothing left behind."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from orchestrator import serve
from orchestrator.errors import OrchError
from tests.integration.conftest import descendants, get

ROOT = Path(__file__).parents[2]
ORCH = [sys.executable, "-m", "orchestrator.cli"]


def left_of(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that live on; a moment is given to whoever was just killed, and a zombie waits for its reaper only."""
    _, alive = psutil.wait_procs(processes, timeout=3)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


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
