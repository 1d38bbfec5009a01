"""A PostgreSQL that is given by its URL (version 15, from Debian), and the making of schemas on any server."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from orchestrator.database import connection as connection_module
from orchestrator.database.connection import Database, check, open_database
from orchestrator.database.reader import run_query
from orchestrator.database.schema import SCHEMA_LOCK, Connection, advisory_lock, prepare
from orchestrator.errors import DatabaseUnavailable
from orchestrator.settings import Home, Settings

DatabaseOn = Callable[..., AbstractContextManager[str]]
PASSWORD = "p%40:/?#x"


def create_mlflow_tables(database: Database) -> None:
    from mlflow.store.db.utils import _safe_initialize_tables, create_sqlalchemy_engine_with_retry

    engine = create_sqlalchemy_engine_with_retry(database.mlflow_uri)
    _safe_initialize_tables(engine)
    engine.dispose()


def mlflow_revision() -> str:
    from mlflow.store.db.utils import _get_latest_schema_revision

    revision: str = _get_latest_schema_revision()
    return revision


def stub_mlflow_tables(database: Database, schema: str = "public", revision: str = "r1") -> None:
    """The tables by which MLflow's schema is known, where a test needs no more of it."""
    with database.connect(autocommit=True) as connection:
        connection.execute(f"create schema if not exists {schema}")
        for table in ("experiments", "latest_metrics", "experiment_tags"):
            connection.execute(f"create table if not exists {schema}.{table} (id int)")
        connection.execute(f"create table if not exists {schema}.alembic_version (version_num text)")
        connection.execute(f"insert into {schema}.alembic_version values ('{revision}')")


def never() -> str:
    raise AssertionError("a prepared database must not need MLflow")


def rows(database: Database, query: str) -> list[tuple[Any, ...]]:
    with database.connect("orch-test", autocommit=True) as connection:
        return connection.execute(query).fetchall()


@pytest.fixture
def database(empty_database_url: str) -> Database:
    return Database.from_url(empty_database_url)


@pytest.fixture
def role(debian_postgres_url: str) -> Iterator[Callable[[str, str], None]]:
    """Makes login roles on Debian's server; whoever owns nothing any more goes at the end."""
    names: list[str] = []

    def make(name: str, password: str) -> None:
        with Database.from_url(debian_postgres_url).connect(autocommit=True) as admin:
            admin.execute(f"create role \"{name}\" login password '{password}'")
        names.append(name)

    yield make
    with Database.from_url(debian_postgres_url).connect(autocommit=True) as admin:
        for name in names:
            admin.execute(f'drop role "{name}"')


def as_user(url: str, user: str, password: str) -> str:
    place = url.rpartition("@")[2]
    return f"postgresql://{quote(user, safe='')}:{quote(password, safe='')}@{place}"


def test_a_user_called_orch_gets_mlflows_tables_in_public(
    debian_postgres_url: str, database_on: DatabaseOn, role: Callable[[str, str], None]
) -> None:
    role("orch", "pw")
    with database_on(debian_postgres_url, owner="orch") as url:
        database = open_database(Settings(database_url=as_user(url, "orch", "pw")), Home(Path("/nonexistent")))
        with database.connect(autocommit=True) as connection:
            connection.execute("create schema orch")  # our views' schema, first in this user's default search path
        assert prepare(database, "v1", [create_mlflow_tables], mlflow_revision)
        schemas = rows(database, "select distinct schemaname::text from pg_tables where tablename = 'experiments'")
        assert schemas == [("public",)]
        with database.engine().connect() as pooled:
            assert pooled.exec_driver_sql("show search_path").scalar() == "public"
        altered = "select count(*) from pg_db_role_setting where setrole in (0, current_user::regrole)"  # 0: a database
        assert rows(database, altered) == [(0,)], "neither its role nor a database was altered"


def test_times_are_read_from_a_database_that_writes_them_in_another_style(database: Database) -> None:
    with database.connect(autocommit=True) as connection:
        for setting in ("datestyle = 'SQL, DMY'", "intervalstyle = 'sql_standard'", "timezone = 'Asia/Kolkata'"):
            connection.execute(f"alter database {database.name} set {setting}")
    moment = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
    asked = "select timestamptz '2026-03-04 05:06:07+00' as at, interval '1 day 2 hours' as lasted"
    for answer in (rows(database, asked), run_query(database, asked).rows):
        assert answer == [(moment, timedelta(hours=26))]
        assert answer[0][0].utcoffset() == timedelta(hours=5.5), "shown in the database's own time zone"
    with database.engine().connect() as pooled:
        assert pooled.exec_driver_sql(asked).one() == (moment, timedelta(hours=26))


def test_a_percent_sign_in_the_password_passes_everywhere_and_shows_nowhere(
    debian_postgres_url: str, database_on: DatabaseOn, role: Callable[[str, str], None]
) -> None:
    role("a@b", PASSWORD)
    with database_on(debian_postgres_url, owner="a@b") as superuser_url:
        url = as_user(superuser_url, "a@b", PASSWORD)
        assert "a%40b:p%2540%3A%2F%3F%23x@" in url
        database = open_database(Settings(database_url=url), Home(Path("/nonexistent")))
        assert prepare(database, "v1", [create_mlflow_tables], mlflow_revision)
        assert rows(database, "select current_user::text") == [("a@b",)]
        done = run_mlflow("db", "upgrade", database.mlflow_uri)  # Alembic interpolates `%`
        assert done.returncode == 0, done.stderr
        for text in (str(database), database.psql_line(), done.stdout + done.stderr):
            assert "p%40" not in text
            assert "p%2540" not in text


def run_mlflow(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    return subprocess.run(
        [sys.executable, "-m", "mlflow", *arguments], capture_output=True, text=True, check=False, env=environment
    )


def test_mlflows_tables_at_another_revision_are_refused_until_the_printed_commands_were_run(
    database: Database, tmp_path: Path
) -> None:
    previous = create_mlflow_tables_one_revision_back(database)
    with pytest.raises(DatabaseUnavailable) as caught:
        prepare(database, "v1", [create_mlflow_tables], mlflow_revision)
    text = str(caught.value)
    assert f"at revision {previous}" in text
    assert f"expects {mlflow_revision()}" in text
    commands = [line for line in text.splitlines() if line.startswith("  ")]
    assert database.psycopg_kwargs["password"] not in text
    assert rows(database, "select version_num from public.alembic_version") == [(previous,)], "it upgraded nothing"
    assert rows(database, "select 1 from pg_namespace where nspname = 'orch_ledger'") == [], "and made nothing"

    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "ORCH_DATABASE_URL": database.url}
    for command in commands:  # as they stand: whoever reads them has the password where orch has it
        done = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "before-upgrade.dump").stat().st_size > 0
    assert prepare(database, "v1", [], mlflow_revision)


def create_mlflow_tables_one_revision_back(database: Database) -> str:
    from alembic import command
    from alembic.script import ScriptDirectory
    from mlflow.store.db.utils import InitialBase, _get_alembic_config, create_sqlalchemy_engine_with_retry

    engine = create_sqlalchemy_engine_with_retry(database.mlflow_uri)
    InitialBase.metadata.create_all(engine)
    config = _get_alembic_config(database.mlflow_uri)
    previous = ScriptDirectory.from_config(config).get_revision(mlflow_revision()).down_revision
    command.upgrade(config, previous)
    engine.dispose()
    assert isinstance(previous, str)
    return previous


def test_of_racing_first_starts_one_makes_the_schema_and_all_succeed(database: Database) -> None:
    made: list[int] = []
    answers: list[bool] = []

    def make(target: Database) -> None:
        made.append(threading.get_ident())
        with target.connect(autocommit=True) as connection:
            connection.execute("create table public.ours (id int)")  # a second one would fail
        time.sleep(0.2)
        stub_mlflow_tables(target)

    threads = [
        threading.Thread(target=lambda: answers.append(prepare(database, "v1", [make], lambda: "r1"))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(made) == 1
    assert sorted(answers) == [False] * 5 + [True]


def test_two_processes_that_start_first_both_find_mlflows_tables(database: Database) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); import test_given_postgres as t\n"
        "from orchestrator.database.connection import Database\n"
        "print(t.prepare(Database.from_url(sys.argv[1]), 'v1', [t.create_mlflow_tables], t.mlflow_revision))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", code, database.url, str(Path(__file__).parent)]
    starters = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    answers = [starter.communicate(timeout=90) for starter in starters]
    assert [starter.returncode for starter in starters] == [0, 0], answers
    assert sorted(answer.strip() for answer, _ in answers) == ["False", "True"]
    assert rows(database, "select version_num from public.alembic_version") == [(mlflow_revision(),)]


def test_a_prepared_database_is_recognised_in_milliseconds_and_without_mlflow(database: Database) -> None:
    assert prepare(database, "v1", [stub_mlflow_tables], lambda: "r1")
    durations_s = []
    for _ in range(5):
        started = time.perf_counter()
        assert not prepare(database, "v1", [stub_mlflow_tables], never)
        durations_s.append(time.perf_counter() - started)
    assert min(durations_s) < 0.1  # one connection and three queries


def test_another_fingerprint_runs_the_steps_again(database: Database) -> None:
    assert prepare(database, "v1", [stub_mlflow_tables], lambda: "r1")
    assert prepare(database, "v2", [], lambda: "r1")
    assert not prepare(database, "v2", [], never)


def test_a_revision_that_somebody_changed_behind_our_back_is_noticed(database: Database) -> None:
    assert prepare(database, "v1", [stub_mlflow_tables], lambda: "r1")
    with database.connect(autocommit=True) as connection:
        connection.execute("update public.alembic_version set version_num = 'r0'")
    with pytest.raises(DatabaseUnavailable, match=r"at revision r0, the installed MLflow expects r1"):
        prepare(database, "v1", [], lambda: "r1")


def test_a_first_start_that_died_between_mlflows_tables_is_taken_up_again(database: Database) -> None:
    def die_half_way(target: Database) -> None:
        with target.connect(autocommit=True) as connection:
            connection.execute("create table public.experiments (id int)")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(database, "v1", [die_half_way], lambda: "r1")
    assert prepare(database, "v1", [stub_mlflow_tables], lambda: "r1")
    assert rows(database, "select key from orch_ledger.meta where key = 'creating'") == []


def test_mlflows_tables_in_another_schema_are_refused(database: Database) -> None:
    stub_mlflow_tables(database, schema="orch")
    with pytest.raises(DatabaseUnavailable, match=r"tables lie in the schema orch, .* use another database: createdb"):
        prepare(database, "v1", [stub_mlflow_tables], lambda: "r1")


def test_somebody_elses_database_is_left_alone_unless_allowed(database: Database) -> None:
    with database.connect(autocommit=True) as connection:
        connection.execute("create table public.payroll (id int)")
    with pytest.raises(DatabaseUnavailable, match="orch doctor --init"):
        prepare(database, "v1", [stub_mlflow_tables], lambda: "r1")
    assert prepare(database, "v1", [stub_mlflow_tables], lambda: "r1", allow_nonempty=True)


def test_the_lock_keeps_others_out_and_is_free_after_an_error(database: Database) -> None:
    attempt = f"select pg_try_advisory_lock({SCHEMA_LOCK})"

    def fail_inside(connection: Connection) -> None:
        with advisory_lock(connection, SCHEMA_LOCK):
            assert rows(database, attempt) == [(False,)]
            raise ZeroDivisionError

    with database.connect(autocommit=True) as connection:
        with pytest.raises(ZeroDivisionError):
            fail_inside(connection)
        assert rows(database, attempt) == [(True,)]


def test_a_user_who_may_create_nothing_is_told_what_to_grant(
    debian_postgres_url: str, database_on: DatabaseOn, role: Callable[[str, str], None]
) -> None:
    role("guest", "pw")
    with database_on(debian_postgres_url) as url:
        database = Database.from_url(as_user(url, "guest", "pw"))
        with pytest.raises(
            DatabaseUnavailable, match=r'may not create tables .* grant create on database "t_\w+" to "guest"'
        ):
            prepare(database, "v1", [], lambda: "r1")


def test_a_wrong_password_is_told_without_showing_it(debian_postgres_url: str) -> None:
    with pytest.raises(DatabaseUnavailable, match="wrong user or password") as caught:
        check(Database.from_url(as_user(debian_postgres_url, "postgres", "hush")))
    assert "hush" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_database_is_told_with_the_command_that_makes_it(debian_postgres_url: str) -> None:
    database = Database.from_url(debian_postgres_url).beside("nowhere")
    with pytest.raises(
        DatabaseUnavailable, match="the database 'nowhere' does not exist; create it: createdb"
    ) as caught:
        check(database)
    assert database.psycopg_kwargs["password"] not in str(caught.value)


def test_a_server_that_is_too_old_is_refused(debian_postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "OLDEST_VERSION", 16)  # 15 is the oldest at hand
    with pytest.raises(DatabaseUnavailable, match="this is PostgreSQL 15, orch needs 16 or newer"):
        check(Database.from_url(debian_postgres_url))
