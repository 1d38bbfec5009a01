"""Real servers for the tests: the embedded PostgreSQL, started once a run, and a PostgreSQL 15 from Debian."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psycopg
import pytest

from orchestrator.database import embedded
from orchestrator.database.connection import Database
from orchestrator.settings import Home

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


@pytest.fixture(name="database_on", scope="session")
def database_on_fixture() -> DatabaseOn:
    """`with database_on(server_url, owner=...) as url:` for tests that need more than one database."""
    return database_on


# Fixtures of the other parts follow here.
