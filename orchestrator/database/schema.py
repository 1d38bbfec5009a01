"""Brings a database to the schema this version needs, once, whoever comes first. Knows no table but its own note.

What is created is handed in as steps. Never upgrades MLflow's tables: other programs may be using them.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import errors
from sqlalchemy.exc import DBAPIError

from orchestrator.database.connection import Database, explain
from orchestrator.database.embedded import binaries
from orchestrator.errors import DatabaseUnavailable

SCHEMA_LOCK = 0x6F726368  # "orch" in ASCII; an advisory lock of one database
FINGERPRINT = "fingerprint"
MLFLOW_REVISION = "mlflow_revision"
IDENTITY = "identity"
CREATING = "creating"  # noted while MLflow's tables are being made, so that a crash there can be told from a stranger's
MLFLOW_TABLES = ("experiments", "latest_metrics", "experiment_tags")  # together they are nobody else's

Connection = psycopg.Connection[tuple[Any, ...]]
Step = Callable[[Database], None]


@dataclass(frozen=True)
class Found:
    """What lies in a database. `revision` is that of MLflow's tables in `public`, None without them."""

    notes: dict[str, str]
    revision: str | None
    foreign_schemas: tuple[str, ...] = ()
    num_public_tables: int = 0

    def is_current(self, fingerprint: str) -> bool:
        """True if this version has prepared it and nobody has touched MLflow's tables since."""
        recorded = self.notes.get(MLFLOW_REVISION)
        return self.notes.get(FINGERPRINT) == fingerprint and recorded is not None and recorded == self.revision


def prepare(
    database: Database,
    fingerprint: str,
    steps: Sequence[Step],
    expected_revision: Callable[[], str],
    allow_nonempty: bool = False,
    password_file: Path | None = None,
) -> bool:
    """Runs `steps` unless `fingerprint` says that they have been run. True if they were.

    `fingerprint` names everything the steps create. `expected_revision` gives the revision of MLflow's tables that the
    installed MLflow needs; it is asked only if there is something to do, because it imports MLflow. `allow_nonempty`
    lets MLflow's tables be added to a database that holds somebody's. `password_file` is named in commands for a
    person to type. Raises DatabaseUnavailable.
    """
    try:
        with database.connect("orch-schema", autocommit=True) as connection:
            if look_quickly(connection).is_current(fingerprint):
                return False
            with advisory_lock(connection, SCHEMA_LOCK):
                found = look(connection)
                if found.is_current(fingerprint):  # another first start has done it meanwhile
                    return False
                _refuse_unsuitable(database, found, expected_revision(), allow_nonempty, password_file)
                _run_steps(connection, database, fingerprint, steps, expected_revision())
                return True
    except (psycopg.Error, DBAPIError) as error:
        in_words = _in_words(database, error.orig if isinstance(error, DBAPIError) else error)
        if in_words is None:
            raise
        raise in_words from error


@contextmanager
def advisory_lock(connection: Connection, key: int) -> Iterator[None]:
    """Holds a lock of the database for as long as this session lives at most; waits for its turn."""
    connection.execute("select pg_advisory_lock(%s)", [key])
    try:
        yield
    finally:
        if not connection.broken:  # a lost session has lost its lock
            connection.execute("select pg_advisory_unlock(%s)", [key])


def look_quickly(connection: Connection) -> Found:
    """The notes and the revision only: two small queries."""
    exists = "select to_regclass('orch_ledger.meta') is not null, to_regclass('public.alembic_version') is not null"
    has_notes, has_revision = connection.execute(exists).fetchone() or (False, False)
    notes = connection.execute("select key, value from orch_ledger.meta").fetchall() if has_notes else []
    rows = connection.execute("select version_num from public.alembic_version").fetchall() if has_revision else []
    return Found({str(key): str(value) for key, value in notes}, str(rows[0][0]) if rows else None)


def look(connection: Connection) -> Found:
    """Everything the guards need to know. Tables of extensions count as nobody's."""
    quick = look_quickly(connection)
    tables = """
        select n.nspname::text, c.relname::text
        from pg_class c join pg_namespace n on n.oid = c.relnamespace
        where c.relkind in ('r', 'p') and n.nspname !~ '^pg_' and n.nspname <> 'information_schema'
          and not exists (select from pg_depend d where d.objid = c.oid and d.deptype = 'e')
    """
    by_schema: dict[str, set[str]] = {}
    for schema, table in connection.execute(tables):
        by_schema.setdefault(schema, set()).add(table)
    with_mlflow = {schema for schema, names in by_schema.items() if names.issuperset(MLFLOW_TABLES)}
    foreign = () if "public" in with_mlflow else tuple(sorted(with_mlflow))
    return Found(quick.notes, quick.revision, foreign, len(by_schema.get("public", ())))


def indexes(connection: Connection) -> set[str]:
    """The names of the valid indexes of MLflow's and the ledger's tables."""
    query = """
        select index.relname
        from pg_index join pg_class as index on index.oid = pg_index.indexrelid
        where pg_index.indisvalid and index.relnamespace in (to_regnamespace('public'), to_regnamespace('orch_ledger'))
    """
    return {str(name) for (name,) in connection.execute(query)}


def _run_steps(
    connection: Connection, database: Database, fingerprint: str, steps: Sequence[Step], expected: str
) -> None:
    if not _has_schema(connection, "orch_ledger"):  # `if not exists` would ask for the right to create one regardless
        connection.execute("create schema orch_ledger")
    connection.execute("create table if not exists orch_ledger.meta (key text primary key, value text not null)")
    _note(connection, {CREATING: expected})
    for step in steps:
        step(database)
    revision = look_quickly(connection).revision
    if revision != expected:
        raise DatabaseUnavailable(f"{database}: MLflow's tables were made at revision {revision}, expected {expected}")
    with connection.transaction():
        _note(connection, {FINGERPRINT: fingerprint, MLFLOW_REVISION: expected})
        connection.execute("delete from orch_ledger.meta where key = %s", [CREATING])


def _has_schema(connection: Connection, name: str) -> bool:
    return connection.execute("select 1 from pg_namespace where nspname = %s", [name]).fetchone() is not None


def _note(connection: Connection, notes: dict[str, str]) -> None:
    upsert = "insert into orch_ledger.meta values (%s, %s) on conflict (key) do update set value = excluded.value"
    for key, value in notes.items():
        connection.execute(upsert, [key, value])


def _refuse_unsuitable(
    database: Database, found: Found, expected: str, allow_nonempty: bool, password_file: Path | None
) -> None:
    if found.foreign_schemas:
        raise DatabaseUnavailable(
            f"{database}: MLflow's tables lie in the schema {', '.join(found.foreign_schemas)}, orch needs them in "
            f"public; use another database: {createdb(database)}"
        )
    if found.revision is None and found.num_public_tables and CREATING not in found.notes and not allow_nonempty:
        raise DatabaseUnavailable(
            f"{database}: {found.num_public_tables} tables lie in its schema public and none is MLflow's; to add ours "
            f"to them run: orch doctor --init; or use another database: {createdb(database)}"
        )
    if found.revision not in (None, expected):
        raise DatabaseUnavailable(_revision_message(database, str(found.revision), expected, password_file))


def _revision_message(database: Database, found: str, expected: str, password_file: Path | None) -> str:
    pg_dump = str(binaries() / "pg_dump")  # new enough for every server of its time; that on PATH may be older
    dump = [pg_dump, "--format=custom", "--file=before-upgrade.dump", database.passwordless_url]
    return (
        f"{database}: MLflow's tables are at revision {found}, the installed MLflow expects {expected}; stop what uses "
        "them, keep a copy, then upgrade:\n"
        f"  {database.in_shell(dump, password_file)}\n"
        f"  {database.mlflow_line('db', 'upgrade', password_file=password_file)}\n"
        "or, if a newer MLflow made those tables, install that version"
    )


def createdb(database: Database) -> str:
    """The command that makes another database beside this one."""
    maintenance = f"--maintenance-db={database.beside('postgres').passwordless_url}"
    return shlex.join(["createdb", maintenance, f"{database.name}_orch"])


def _in_words(database: Database, error: BaseException | None) -> DatabaseUnavailable | None:
    """What the user can mend: a lost connection, a missing right. None for our own mistakes."""
    if isinstance(error, psycopg.OperationalError):
        return explain(error, database)
    if not isinstance(error, errors.InsufficientPrivilege):
        return None
    reason = str(error).splitlines()[0]
    return DatabaseUnavailable(
        f"{database}: the user {database.user!r} may not create tables there ({reason}); as its owner run: "
        f'grant create on database "{database.name}" to "{database.user}"; '
        f'grant create on schema public to "{database.user}"'
    )


def name_contents(database: Database) -> None:
    """Gives the database's contents a name for ever; a copy of them, or a restored backup, keeps it."""
    with database.connect("orch-schema", autocommit=True) as connection:
        query = "insert into orch_ledger.meta values (%s, gen_random_uuid()::text) on conflict (key) do nothing"
        connection.execute(query, [IDENTITY])


def identity(connection: Connection) -> str:
    """The name that `name_contents` gave."""
    row = connection.execute("select value from orch_ledger.meta where key = %s", [IDENTITY]).fetchone()
    assert row is not None, "prepare has named it"
    return str(row[0])
