"""Real servers for the tests: the embedded PostgreSQL, started once a run, and a PostgreSQL 15 from Debian."""

from __future__ import annotations

import json
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from orchestrator.database import embedded
from orchestrator.database.connection import Database
from orchestrator.settings import Home
from orchestrator.workspace import Workspace, open_workspace
from tests.warm import WarmProcess, type_warm

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: small tensors, and on two busy cores a second thread only spins

DatabaseOn = Callable[..., AbstractContextManager[str]]

DEBIAN_BINARIES = Path("/usr/lib/postgresql/15/bin")


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A `.orch` for the whole run."""
    return Home(tmp_path_factory.mktemp("home") / ".orch").ensure()


@pytest.fixture(scope="session")
def server_url(home: Home) -> Iterator[str]:
    """The embedded server's URL, with its database `orch`."""
    yield embedded.ensure_running(home)
    embedded.stop(home)
    shutil.rmtree(home.short_folder, ignore_errors=True)  # others may have used it too


@pytest.fixture
def empty_database_url(server_url: str) -> Iterator[str]:
    """A new database on the embedded server."""
    with database_on(server_url) as url:
        yield url


@pytest.fixture(scope="session")
def debian_postgres_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The superuser's URL of a PostgreSQL 15 on a loopback port; scram, in a folder that goes away afterwards."""
    if not (DEBIAN_BINARIES / "postgres").exists():
        message = f"no PostgreSQL 15 in {DEBIAN_BINARIES}; Debian's package `postgresql` has it"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    folder = Path(tempfile.mkdtemp(prefix="orch-debian-", dir="/tmp"))  # pytest's own folder is closed to other users
    try:
        yield from _serve_debian(folder)
    finally:
        shutil.rmtree(folder)


def _serve_debian(folder: Path) -> Iterator[str]:
    user = _unprivileged_user()
    password = secrets.token_hex(8)
    password_file = folder / "password"
    password_file.write_text(password)
    if user is not None:
        os.chown(folder, user, user)
        os.chown(password_file, user, user)
    identity = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    initdb = [DEBIAN_BINARIES / "initdb", "-D", folder / "data", "-U", "postgres", "--no-sync", "--encoding=UTF8"]
    options = ["--locale=C", "--auth=scram-sha-256", f"--pwfile={password_file}"]
    subprocess.run([*initdb, *options], check=True, capture_output=True, cwd="/", **identity)
    port = free_port()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [DEBIAN_BINARIES / "postgres", "-D", folder / "data", "-p", str(port), "-k", folder, "-c", "fsync=off"],
            stdout=log,
            stderr=log,
            cwd="/",
            **identity,
        )
    try:
        url = f"postgresql://postgres:{password}@127.0.0.1:{port}/postgres"
        _wait_until_it_answers(url, process, folder / "log")
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)


def _unprivileged_user() -> int | None:
    """PostgreSQL does not run as root."""
    return pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else None


def _wait_until_it_answers(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            psycopg.connect(url).close()
            return
        except psycopg.OperationalError:
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"PostgreSQL 15 does not start:\n{log.read_text()}")
            time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def database_on(url: str, owner: str | None = None) -> Iterator[str]:
    """A new database on the server of `url`, dropped at the end whoever is still connected."""
    server, name = Database.from_url(url).beside("postgres"), f"t_{secrets.token_hex(6)}"
    with server.connect("orch-tests", autocommit=True) as connection:
        connection.execute(f"create database {name}" + (f' owner "{owner}"' if owner else ""))
    try:
        yield server.beside(name).url
    finally:
        with server.connect("orch-tests", autocommit=True) as connection:
            connection.execute(f"drop database {name} with (force)")


def workspace_on(url: str, home: Path) -> Workspace:
    """A database that is ready to use, for fixtures that outlive a test: no other test may see the variable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORCH_DATABASE_URL", url)
        return open_workspace(home)


OUR_VARIABLES = {name: value for name, value in os.environ.items() if name.startswith("ORCH_")}


@pytest.fixture(autouse=True)
def _no_fixture_changes_the_environment_of_other_tests() -> None:
    """Comes after the fixtures of modules and sessions, and before those of the test."""
    assert {name: value for name, value in os.environ.items() if name.startswith("ORCH_")} == OUR_VARIABLES


@pytest.fixture(name="database_on", scope="session")
def database_on_fixture() -> DatabaseOn:
    """`with database_on(server_url, owner=...) as url:` for tests that need more than one database."""
    return database_on


# Fixtures of the other parts follow here.


# The command `orch`, as people type it.

LAB = Path(__file__).parent / "lab"
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Orch:
    """Runs `orch` in a process of its own, in a folder whose module `orch_lab` holds small workloads.

    A call waits for the end, `start_warm` does not. `start` is a cold process, for what happens while it imports.
    """

    env: dict[str, str]
    folder: Path
    before: str = ""  # Python that a cold command runs first, such as to shorten a wait

    def command(self, *arguments: object) -> list[str]:
        program = ["-c", f"{self.before}\nfrom orchestrator.cli import main\nmain()"]
        return [sys.executable, *(program if self.before else ["-m", "orchestrator.cli"]), *map(str, arguments)]

    def __call__(self, *arguments: object, expect: int | None = 0, timeout_s: float = 240) -> Done:
        answer = Done(*type_warm(list(map(str, arguments)), LAB, self.env, timeout_s))
        assert expect is None or answer.code == expect, str(answer)
        assert "Traceback" not in answer.err, answer.err
        return answer

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments),
            cwd=LAB,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def start_warm(self, *arguments: object) -> WarmProcess:
        return WarmProcess(list(map(str, arguments)), LAB, self.env)

    def sweep_file(self, text: str, name: str) -> Path:
        """A sweep file called `name`.yaml."""
        path = self.folder / f"{name}.yaml"
        path.write_text(textwrap.dedent(text))
        return path

    def rows(self, query: str) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = json.loads(self("sql", query, "--format", "json").out)
        return answer


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def orch(home: Home, server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Orch:
    """`orch` on the embedded server of this test run."""
    ours = ("ORCH_", "RAY_", "MLFLOW_", "OMP_NUM_THREADS")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    env |= {"ORCH_HOME": str(home.path), "COLUMNS": "200"}
    return Orch(env, tmp_path_factory.mktemp("sweeps"))


@pytest.fixture
def name() -> str:
    """A sweep name that no other test uses."""
    return f"t{secrets.token_hex(5)}"


@pytest.fixture(scope="session")
def ray_orch(orch: Orch, home: Home) -> Iterator[Orch]:
    """`orch` attached to one Ray of two CPUs and two pretended GPUs that serves the whole test run."""
    folder = Path(tempfile.mkdtemp(prefix="orch-ray-", dir="/tmp"))
    token_file = home.secret_file("ray_token")
    port = free_port()
    env = {
        **orch.env,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "1",
    }
    ray = Path(sys.executable).with_name("ray")
    start = ["start", "--head", f"--port={port}", "--num-cpus=2", "--num-gpus=2", f"--temp-dir={folder}", "--block"]
    with (folder / "log").open("wb") as log:
        head = subprocess.Popen(
            [ray, *start, "--include-dashboard=false"], env=env, stdout=log, stderr=log, start_new_session=True
        )
    try:
        while "Ray runtime started" not in (folder / "log").read_text():
            assert head.poll() is None, (folder / "log").read_text()
            time.sleep(0.05)
        yield Orch({**env, "RAY_ADDRESS": f"127.0.0.1:{port}"}, orch.folder)
    finally:
        family = [psutil.Process(head.pid), *psutil.Process(head.pid).children(recursive=True)]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        head.wait(timeout=30)
        shutil.rmtree(folder, ignore_errors=True)
