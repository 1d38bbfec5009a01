"""The login of `orch sql`: reads schema `orch`, and nothing else whatever the query tries."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
import pytest
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

from orchestrator.database import reader as reader_module
from orchestrator.database import view_catalog
from orchestrator.database.connection import Database
from orchestrator.database.reader import ensure_reader, reader_database, reader_login, run_query
from orchestrator.errors import DatabaseUnavailable, QueryError
from orchestrator.ledger import Ledger, upgrade
from orchestrator.trial import Candidate, config_hash

SECRET = "the owner's password"


@contextmanager
def prepared(server: Database, name: str, artifacts: Path, superuser: Database | None = None) -> Iterator[Database]:
    """A database with MLflow's tables, the ledger and one sweep `t` of one trial; dropped by `superuser` in the end."""
    with server.connect(autocommit=True) as admin:
        admin.execute(f"create database {name}")
        owner = server.beside(name)
        SqlAlchemyStore(owner.mlflow_uri, artifacts.as_uri())
        engine = owner.engine()
        with engine.connect() as connection:
            upgrade(connection)
        ledger = Ledger(engine)
        columns = {"lr": "double precision", "opt.lr": "double precision"}
        sweep = ledger.create_sweep(name="t", workload="w", spec={}, metric="loss", mode="min", columns=columns)
        config = {"lr": math.inf, "opt.lr": 0.1}
        ledger.add_trials(sweep.id, [(Candidate(config, {}), config, config_hash(config))])
        engine.dispose()
        with owner.connect(autocommit=True) as connection:
            view_catalog.apply(connection)
        yield owner
    with (superuser or server).connect(autocommit=True) as admin:  # others' connections may be closing still
        admin.execute(f"drop database {name} with (force)")
        admin.execute(f"drop role if exists {reader_login(name, '').role}")


@pytest.fixture(scope="module")
def owner(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    server = Database.from_url(server_url).beside("postgres")
    with prepared(server, "reader_lab", tmp_path_factory.mktemp("artifacts")) as database:
        yield database


@pytest.fixture
def reader(owner: Database) -> Database:
    with owner.connect() as connection:
        return reader_database(owner, ensure_reader(connection, SECRET, is_server_ours=True))


# What it can do


def test_the_reader_sees_the_views_without_naming_their_schema(reader: Database) -> None:
    answer = run_query(reader, "select sweep, trial, params from runs;")
    assert answer == (["sweep", "trial", "params"], [("t", 0, {"lr": "Infinity", "opt.lr": 0.1})])
    assert run_query(reader, 'select lr, "opt.lr" from sweep_t') == (["lr", "opt.lr"], [(math.inf, 0.1)])
    percent = "select '100%' as share, trial % 2 as odd from runs where sweep like 't%'"
    assert run_query(reader, percent) == (["share", "odd"], [("100%", 0)])
    assert run_query(reader, "explain select sweep from sweeps").columns == ["QUERY PLAN"]
    assert run_query(reader, "-- nothing") == ([], [])


def test_the_reader_keeps_its_rights_when_views_are_made_anew(owner: Database, reader: Database) -> None:
    with owner.connect(autocommit=True) as connection:
        connection.execute("drop view orch.sweep_t")
        view_catalog.rebuild_sweep_view(connection, "t")
        assert run_query(reader, "select count(*) from sweep_t").rows == [(1,)]
        connection.execute("drop schema orch cascade")
        view_catalog.apply(connection)
        ensure_reader(connection, SECRET, is_server_ours=True)
    assert run_query(reader, "select count(*) from sweep_t").rows == [(1,)]


# What it cannot do


@pytest.mark.parametrize(
    "query",
    [
        "select count(*) from public.runs",
        "select value from public.metrics",
        "select name from orch_ledger.sweeps",
        "select verifier from orch_ledger.readers",
        "select rolpassword from pg_authid",
        "create temporary table mine (a int)",
        "select 1 as a into temporary mine",
        "create table orch.mine (a int)",
        "create view mine as select 1 as a",
        "create function public.f() returns int language sql as 'select 1'",
        "drop view runs",
        "delete from runs",
        "insert into sweeps (sweep) values ('x')",
        "set role {owner}",
        "set session authorization {owner}",
        "alter role current_user superuser",
        "create role other",
        "copy (select 1) to program 'touch /tmp/x'",
        "copy (select 1) to '/tmp/x'",
        "copy (select 1) to stdout",
        "select pg_read_file('/etc/passwd')",
        "select lo_import('/etc/passwd')",
        "select lo_create(4711)",
        "select pg_terminate_backend(pid) from pg_stat_activity where usename = '{owner}'",
        "do $$ begin perform 1; end $$; select 1",
        "select 1; select 2",
        "commit; create temporary table mine (a int)",
        "set transaction read write; select 1",
    ],
)
def test_the_reader_is_refused(owner: Database, reader: Database, query: str) -> None:
    with owner.connect(autocommit=True):  # somebody to terminate
        with pytest.raises(QueryError) as error:
            run_query(reader, query.format(owner=owner.user))
    assert "Traceback" not in str(error.value)


@pytest.mark.parametrize(
    "query",
    [
        "select count(*) from public.runs",
        "select name from orch_ledger.sweeps",
        "create temporary table mine (a int)",
        "create table orch.mine (a int)",
        "create table public.mine (a int)",
        "create schema mine",
        "drop view orch.runs",
        "select lo_create(0)",
        "select lo_from_bytea(0, 'x')",
        "set temp_file_limit = -1",
        "set session_replication_role = replica",
        "alter role current_user connection limit -1",
    ],
)
def test_the_rights_alone_refuse_it_too(owner: Database, reader: Database, query: str) -> None:
    with psycopg.connect(**reader.psycopg_kwargs, autocommit=True) as connection:
        connection.execute("set default_transaction_read_only = off")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute(query)


def test_a_long_query_is_cut(reader: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(reader_module.SESSION, "statement_timeout", "200ms")
    started = time.monotonic()
    with pytest.raises(QueryError, match="statement timeout"):
        run_query(reader, "select pg_sleep(20)")
    assert time.monotonic() - started < 5


def test_the_role_itself_carries_the_limits(owner: Database, reader: Database) -> None:
    plain = {**reader.psycopg_kwargs, "options": ""}  # as somebody logs in with psql
    with psycopg.connect(**plain) as connection:
        settings = {name: connection.execute(f"show {name}").fetchone() for name in reader_module.SESSION}
    assert settings == {
        "search_path": ("orch",),
        "default_transaction_read_only": ("on",),
        "statement_timeout": ("1min",),
        "lock_timeout": ("10s",),
        "idle_in_transaction_session_timeout": ("5min",),
        "jit": ("off",),
        "DateStyle": ("ISO, MDY",),
        "IntervalStyle": ("postgres",),
    }


def test_a_query_that_fills_the_disk_is_cut(owner: Database, reader: Database) -> None:
    limit = "alter role {} set temp_file_limit = '{}'"
    assert run_query(reader, "show temp_file_limit").rows == [("1GB",)]
    with owner.connect(autocommit=True) as connection:
        connection.execute(limit.format(reader.user, "1MB"))
        try:
            with pytest.raises(QueryError, match="temporary file size exceeds"):
                run_query(reader, "select count(*) from generate_series(1, 10000000000)")
        finally:
            connection.execute(limit.format(reader.user, "1GB"))


def test_readers_leave_connections_for_others(owner: Database, reader: Database) -> None:
    with ExitStack() as stack:
        for _ in range(reader_module.MAX_CONNECTIONS):
            stack.enter_context(psycopg.connect(**reader.psycopg_kwargs))
        with pytest.raises(DatabaseUnavailable, match="too many connections for role"):
            run_query(reader, "select 1")
        with owner.connect() as connection:
            assert connection.execute("select 1").fetchone() == (1,)


def test_a_reader_waits_for_no_lock_longer_than_it_should(
    owner: Database, reader: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(reader_module.SESSION, "lock_timeout", "50ms")
    with owner.connect() as connection:
        connection.execute("lock table orch.runs in access exclusive mode")
        with pytest.raises(QueryError, match="lock timeout"):
            run_query(reader, "select count(*) from runs")


def test_the_reader_cannot_log_in_with_another_password(reader: Database) -> None:
    other = Database(tuple(sorted({**dict(reader.parameters), "password": "guess"}.items())))
    with pytest.raises(DatabaseUnavailable) as error:
        run_query(other, "select 1")
    assert "their reader cannot log in (" in str(error.value)
    assert "guess" not in str(error.value)


# How it is made


def test_every_host_derives_the_same_login_and_no_other_database_shares_it() -> None:
    first = reader_login("a", SECRET)
    assert first == reader_login("a", SECRET)
    assert first.role != reader_login("b", SECRET).role
    assert first.password != reader_login("a", "other").password
    assert first.password not in repr(first)


def test_an_existing_reader_costs_one_look_and_a_new_secret_mends_it(owner: Database, reader: Database) -> None:
    with owner.connect(autocommit=True) as connection:
        before = connection.execute("select made_at from orch_ledger.readers").fetchall()
        ensure_reader(connection, SECRET, is_server_ours=True)
        assert connection.execute("select made_at from orch_ledger.readers").fetchall() == before
        may = "select has_function_privilege('public', 'lo_creat(integer)', 'execute')"
        assert connection.execute(may).fetchone() == (False,)
        connection.execute("grant execute on function lo_creat(integer) to public")
        renewed = reader_database(owner, ensure_reader(connection, "a new password", is_server_ours=False))
        assert connection.execute(may).fetchone() == (True,), "on a given server others may need it"
        assert run_query(renewed, "select 1").rows == [(1,)]
        with pytest.raises(DatabaseUnavailable):
            run_query(reader, "select 1")
        ensure_reader(connection, SECRET, is_server_ours=True)


def test_an_owner_that_may_not_create_roles_is_told_the_way_out(
    debian_postgres_url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    admin = Database.from_url(debian_postgres_url)
    password = secrets.token_hex(8)
    with admin.connect(autocommit=True) as connection:
        connection.execute(f"create role orch login createdb password '{password}'")  # orch: also a schema's name
    plain = Database(tuple(sorted({**dict(admin.parameters), "user": "orch", "password": password}.items())))
    with prepared(plain, "plain_owner", tmp_path_factory.mktemp("artifacts"), superuser=admin) as owner:
        with owner.connect() as connection, pytest.raises(DatabaseUnavailable, match="ORCH_READER_URL"):
            ensure_reader(connection, password, is_server_ours=False)
        with admin.connect(autocommit=True) as connection:
            connection.execute("alter role orch createrole")  # still no superuser, on PostgreSQL 15
        with owner.connect() as connection:
            reader = reader_database(owner, ensure_reader(connection, password, is_server_ours=False))
        assert run_query(reader, "select count(*) from runs").rows == [(1,)]
        for query in ("select count(*) from public.runs", "create temporary table mine (a int)"):
            with pytest.raises(QueryError):
                run_query(reader, query)
        role = reader.user
    with admin.connect(autocommit=True) as connection:  # roles belong to the server, which other tests use too
        connection.execute(f"drop role if exists {role}")
        connection.execute("drop role orch")


# Errors in words


def test_an_error_shows_the_place_and_the_nearest_names(reader: Database) -> None:
    cases = {
        "select verdct from runs": 'column "verdct" does not exist\n  select verdct from runs\n         ^',
        "select r.sweeep from runs as r": "nearest: sweep",
        "select sweep\nfrom runz": 'relation "runz" does not exist\n  from runz\n       ^\nnearest: runs',
        "select opt.lr from sweep_t": 'nearest: "opt.lr"',
        'select "Lr" from sweep_t': "nearest: lr",
        "select lr from sweep_T where": "syntax error at end of input",
        "select 1 / 0": "division by zero",
        "select 'a' || E'\\xff'": "invalid byte sequence",
        "select '\udcff'": "not valid text at character 9",
    }
    for query, expected in cases.items():
        with pytest.raises(QueryError) as error:
            run_query(reader, query)
        assert expected in str(error.value), query
    with pytest.raises(QueryError) as error:
        run_query(reader, "select verdct from runs")
    assert str(error.value).endswith("nearest: verdict")
