"""Fixtures for trouble: a PostgreSQL that can be stopped and started, and a look at what a refused command left."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

    def stop(self) -> None:
        embedded.stop(self.home)

    def start(self) -> str:
        return embedded.ensure_running(self.home)

    def value(self, query: str, *parameters: object) -> Any:
        """The first column of the first row, as the owner sees it."""
        return value_of(self.orch.env["ORCH_DATABASE_URL"], query, *parameters)


@pytest.fixture(scope="session")
def fragile(tmp_path_factory: pytest.TempPathFactory, orch: Orch) -> Iterator[FragileServer]:
    """Allows 20 connections. Whoever stops it starts it again."""
    folder = tmp_path_factory.mktemp("fragile")
    home = Home(folder / ".server")
    embedded.ensure_running(home)
    embedded.stop(home)
    with (home.path / "postgres" / "postgresql.conf").open("a") as conf:
        conf.write("\nmax_connections = 20\n")
    url = embedded.ensure_running(home)
    env = {**orch.env, "ORCH_DATABASE_URL": url, "ORCH_HOME": str(folder / ".orch")}
    server = FragileServer(home, Orch(env, folder))
    server.orch("status")  # makes the schema
    yield server
    server.stop()
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
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        assert ended.value.code == 2, out + err
        assert "Traceback" not in err
        return Done(2, out, err)

    return typed
