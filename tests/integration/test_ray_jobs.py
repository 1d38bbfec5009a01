"""A sweep handed to a cluster's job server: a real head of Ray, its own `orch`, and the database both sides reach."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import psutil
import psycopg
import pytest

from orchestrator.settings import Home
from tests.conftest import DatabaseOn, Orch, free_port

TINY = """
    workload: {package}.models:Counter
    metric: {{name: train/loss, mode: min}}
    params: {{steps: 5, raise_at: {{grid: [0, 3]}}}}
    preflight: false
"""
SERVER_MODULES = ("aiohttp_cors", "opencensus", "colorful", "prometheus_client", "smart_open")  # of ray[default]
START_LIMIT_S = 90  # a head brings up a dozen processes; measured 7 s on two idle cores


@dataclass(frozen=True)
class JobServer:
    """`orch` as typed far from the cluster, and where its job server and its files are."""

    orch: Orch
    url: str
    folder: Path

    def detach(self, spec: Path | str, *more: object, expect: int = 0, **env: str) -> str:
        done = replace(self.orch, env={**self.orch.env, **env})("sweep", spec, "--detach", *more, expect=expect)
        return done.out if expect == 0 else done.err


@pytest.fixture(scope="module")
def server(orch: Orch, home: Home, server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobServer]:
    missing = [name for name in SERVER_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"Ray is installed without its job server (no {missing[0]}): pip install -e '.[cluster]'")
    folder = Path(tempfile.mkdtemp(prefix="orch-jobs-", dir="/tmp"))
    artifacts = tmp_path_factory.mktemp("artifacts")
    env = {
        **orch.env,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": home.secret("ray_token"),
        "ORCH_DATABASE_URL": server_url,
        "ORCH_ARTIFACT_ROOT": artifacts.as_uri(),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    port, jobs_port = free_port(), free_port()
    start = ["start", "--head", f"--port={port}", "--num-cpus=2", f"--dashboard-port={jobs_port}", "--block"]
    with (folder / "log").open("wb") as log:
        head = subprocess.Popen(
            [Path(sys.executable).with_name("ray"), *start, f"--temp-dir={folder}", "--disable-usage-stats"],
            env={**env, "ORCH_HOME": str(folder / ".orch"), "ORCH_JOURNAL_DIR": str(folder / "journal")},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{jobs_port}"
    try:
        _until(lambda: _answers(url), START_LIMIT_S, lambda: (folder / "log").read_text())
        typed = Orch({**env, "RAY_ADDRESS": url}, tmp_path_factory.mktemp("typed"))
        yield JobServer(typed, url, folder)
    finally:
        for process in [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]:
            process.kill()
        head.wait(timeout=30)
        shutil.rmtree(folder, ignore_errors=True)


def _answers(url: str) -> bool:
    try:
        urlopen(f"{url}/api/version", timeout=5).close()
    except HTTPError as error:
        return error.code == 401  # it wants the token
    except OSError:
        return False
    raise AssertionError("the job server lets in whoever brings no token")


def _until(happened: Callable[[], bool], limit_s: float, otherwise: Callable[[], str]) -> None:
    deadline = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.1)


@pytest.fixture
def spec(server: JobServer, name: str) -> Path:
    """A sweep whose workload only the submitter has: a package beside the tests that no node can import."""
    package = server.orch.folder / f"lab_{name}"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(Path(__file__).parents[1] / "lab/orch_lab.py", package / "models.py")
    return server.orch.sweep_file(TINY.format(package=package.name), name)


@pytest.mark.slow
def test_a_detached_sweep_runs_in_the_cluster_with_the_code_that_came_along(
    server: JobServer, spec: Path, name: str, server_url: str
) -> None:
    package = str(server.orch.folder)
    said = server.detach(f"{spec.parent}/./{spec.name}", PYTHONPATH=package)
    assert f"{name} runs on without this terminal" in said
    assert f"orch logs {name}" in said
    _until(lambda: _state(server, name) == "finished", 60, lambda: str(server.orch("status", expect=None)))
    runs = server.orch.rows(f"select state, host from runs where sweep = '{name}' order by trial")
    assert [run["state"] for run in runs] == ["finished", "failed"]
    shown = server.detach(spec, "--resume", expect=1, PYTHONPATH=package)  # nothing is left: the job has its own end
    assert f"{name}: 1/2 finished (1 failed)" in shown
    assert "without this terminal" not in shown
    password = server_url.partition("@")[0].rpartition(":")[2]
    files = [path for path in server.folder.glob("session_*/logs/**/*") if path.is_file()]
    assert files
    assert not [path for path in files if password.encode() in path.read_bytes()], "Ray shows and keeps what it is sent"


def _state(server: JobServer, name: str) -> str:
    rows = server.orch.rows(f"select state from sweeps where sweep = '{name}'")
    return str(rows[0]["state"]) if rows else ""


def test_a_command_that_was_submitted_for_another_database_starts_nothing(
    orch: Orch, name: str, server_url: str, database_on: DatabaseOn
) -> None:
    file = orch.sweep_file(TINY.format(package="orch_lab").replace(".models", ""), name)
    as_job = {**orch.env, "ORCH_EXPECTED_DATABASE": "the submitter's"}
    with database_on(server_url) as ours:
        refused = Orch({**as_job, "ORCH_DATABASE_URL": ours}, orch.folder)("sweep", file, "--inline", expect=2)
        assert "is not the database that the sweep was submitted with" in refused.err
        assert "***" in refused.err
        with psycopg.connect(ours) as connection:
            assert connection.execute("select count(*) from pg_tables where schemaname = 'public'").fetchone() == (0,)
    refused = Orch(as_job, orch.folder)("sweep", file, "--inline", expect=2)
    assert "the cluster's head names no database: set ORCH_DATABASE_URL" in refused.err


@pytest.mark.slow
def test_a_wrong_token_and_a_silent_address_are_told_at_once(server: JobServer, spec: Path) -> None:
    package = str(server.orch.folder)
    wrong = server.detach(spec, expect=2, PYTHONPATH=package, RAY_AUTH_TOKEN="0" * 32)
    assert "the cluster refuses the token; set RAY_AUTH_TOKEN" in wrong
    silent = server.detach(spec, "--address", f"http://127.0.0.1:{free_port()}", expect=2, PYTHONPATH=package)
    assert "no job server answers (Connection refused)" in silent
