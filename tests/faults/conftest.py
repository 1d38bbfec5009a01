"""Fixtures for trouble: a PostgreSQL that can be stopped and started, and a look at what a refused command left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from orchestrator import cli
from orchestrator.database import embedded
from orchestrator.database.connection import Database
from orchestrator.settings import Home
from tests.conftest import LAB, Done, Orch

TABLES = ("orch_ledger.sweeps", "orch_ledger.trials", "public.runs", "public.experiments")


@dataclass(frozen=True)
class FragileServer:
    """A PostgreSQL of its own, given to `orch` by ORCH_DATABASE_URL."""

    home: Home
    orch: Orch
    is_small: bool  # its disk can be filled up

    def stop(self) -> None:
        embedded.stop(self.home)

    def start(self) -> str:
        return embedded.ensure_running(self.home)

    def kill(self) -> None:
        """As the kernel does for want of memory: the server has no last word."""
        server = embedded.running(self.home)
        assert server is not None
        os.kill(server.pid, signal.SIGKILL)

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """Refuses all writes, as a server that is being looked after."""
        for statement in ("alter system set default_transaction_read_only = on", "select pg_reload_conf()"):
            self.value(statement)
        try:
            yield
        finally:
            with Database.from_url(self.orch.env["ORCH_DATABASE_URL"]).connect("orch-tests", autocommit=True) as owner:
                owner.execute("alter system reset default_transaction_read_only")
                owner.execute("select pg_reload_conf()")

    @contextmanager
    def full(self) -> Iterator[None]:
        """Without a free block on its disk."""
        filler = self.home.path / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(2**16))
        with filler.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(512))
        try:
            yield
        finally:
            filler.unlink()

    @contextmanager
    def crowded(self) -> Iterator[None]:
        """With all its connections taken by others."""
        database, others = Database.from_url(self.orch.env["ORCH_DATABASE_URL"]), []
        with suppress(psycopg.OperationalError):
            while True:
                others.append(database.connect("others"))
        try:
            yield
        finally:
            for other in others:
                other.close()

    def value(self, query: str, *parameters: object) -> Any:
        """The first column of the first row, as the owner sees it."""
        return value_of(self.orch.env["ORCH_DATABASE_URL"], query, *parameters)


@pytest.fixture(scope="session")
def fragile(tmp_path_factory: pytest.TempPathFactory, orch: Orch) -> Iterator[FragileServer]:
    """Allows 20 connections, and lies on a small disk where one can be mounted. Whoever stops it starts it again."""
    folder = tmp_path_factory.mktemp("fragile")
    home = Home(folder / ".server").ensure()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256m,mode=700", "none", str(home.path)]
    is_small = os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    embedded.ensure_running(home)
    embedded.stop(home)
    with (home.path / "postgres" / "postgresql.conf").open("a") as conf:
        conf.write("\nmax_connections = 20\n")
    url = embedded.ensure_running(home)
    env = {**orch.env, "ORCH_DATABASE_URL": url, "ORCH_HOME": str(folder / ".orch")}
    server = FragileServer(home, Orch(env, folder), is_small)
    server.orch("status")  # makes the schema
    yield server
    server.stop()
    if is_small:
        subprocess.run(["umount", "-l", str(home.path)], check=True)
    for place in (home, Home(folder / ".orch")):
        shutil.rmtree(place.short_folder, ignore_errors=True)  # there may be none


def value_of(url: str, query: str, *parameters: object) -> Any:
    with Database.from_url(url).connect("orch-tests", autocommit=True) as connection:
        cursor = connection.execute(query, parameters or None)
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"did not happen within {timeout_s:.0f} s")
        time.sleep(0.1)


def num_points(url: str, sweep: str) -> int:
    """Points of a sweep in MLflow's table."""
    query = """
        select count(*) from public.metrics as metric
        join orch_ledger.trials as trial on trial.run_id = metric.run_uuid
        join orch_ledger.sweeps as sweep on sweep.id = trial.sweep_id
        where sweep.name = %s
    """
    return int(value_of(url, query, sweep))


@dataclass(frozen=True)
class Traces:
    """What exists before a command that is to be refused, and must be all that exists afterwards."""

    url: str
    home: Home

    def now(self) -> dict[str, Any]:
        rows = {table: value_of(self.url, f"select count(*) from {table}") for table in TABLES}
        return {**rows, "files": self._files(), "ray sessions": self._ray_sessions()}

    def _files(self) -> set[Path]:
        """Not PostgreSQL's, whose files come and go, and not the logs."""
        changing = ("postgres", "logs", "secrets")
        return {
            path
            for path in self.home.path.rglob("*")
            if path.is_file() and not path.relative_to(self.home.path).parts[0].startswith(changing)
        }

    def _ray_sessions(self) -> set[Path]:
        folder = self.home.short_folder.with_name(f"{self.home.short_folder.name}-ray")
        return set(folder.glob("*/session_*"))


@pytest.fixture(scope="session")
def prepared_url(orch: Orch, server_url: str) -> str:
    """The embedded server's URL, with all tables and views."""
    orch("status")
    return server_url


@pytest.fixture
def untouched(prepared_url: str, home: Home) -> Iterator[Traces]:
    """Fails the test if a command left a row, an experiment, a Ray session or a file behind."""
    traces = Traces(prepared_url, home)
    before = traces.now()
    yield traces
    assert traces.now() == before


@pytest.fixture
def type_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], orch: Orch) -> Callable[..., Done]:
    """Calls the command's entry point in this process: a refusal needs no process of its own. Expects exit 2."""
    monkeypatch.chdir(LAB)
    monkeypatch.syspath_prepend(str(LAB))
    for variable in ("ORCH_HOME", "COLUMNS"):
        monkeypatch.setenv(variable, orch.env[variable])

    def typed(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["orch", *map(str, arguments)])
        monkeypatch.setattr("orchestrator.signals.ignore", lambda: None)  # this process goes on
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        assert ended.value.code == 2, out + err
        assert "Traceback" not in err
        return Done(2, out, err)

    return typed
