"""Dumps a database with PostgreSQL's own programs and loads such a dump into an empty one, whole or not at all.

Dumps schema `public` (MLflow's tables), the ledger and Optuna's mirror; never schema `orch`, which is built anew.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any

import psycopg
from psycopg import sql

from orchestrator.database.connection import Database, explain
from orchestrator.database.embedded import binaries
from orchestrator.database.keeper import environment
from orchestrator.errors import DatabaseUnavailable

DUMPED_SCHEMAS = ("public", "orch_ledger", "optuna")
HEADER_LINES = 60  # where a dump's settings stand, before its first table
UNKNOWN_SETTINGS = (b"SET transaction_timeout ",)  # of PostgreSQL 17; an older server refuses them, and needs none

Connection = psycopg.Connection[tuple[Any, ...]]


def programs(server_version: int) -> Path:
    """The folder of a `pg_dump` that can read a server of this major version: the embedded server's, or that on PATH.

    Raises DatabaseUnavailable where all are older than the server.
    """
    found = shutil.which("pg_dump")
    seen = []
    for folder in [binaries(), *([Path(found).parent] if found else [])]:
        version = _version_of(folder / "pg_dump")
        if version >= server_version:
            return folder
        seen.append(f"{folder / 'pg_dump'} is {version}")
    raise DatabaseUnavailable(
        f"the server is PostgreSQL {server_version} and no pg_dump here is that new ({', '.join(seen)}); "
        f"install PostgreSQL {server_version}'s client programs, so that its pg_dump comes first on PATH"
    )


@contextmanager
def snapshot(database: Database) -> Iterator[tuple[Connection, str]]:
    """A connection that sees one moment of the database until the block ends, and that moment's name for `dump`."""
    try:
        with closing(database.connect("orch backup")) as connection:  # with no word on a rollback when it broke
            connection.execute("set transaction isolation level repeatable read, read only")
            row = connection.execute("select pg_export_snapshot()").fetchone()
            assert row is not None
            yield connection, str(row[0])
    except psycopg.OperationalError as error:
        raise explain(error, database) from error


def count_rows(connection: Connection, table: str) -> int:
    """`table` is a qualified name of ours."""
    schema, name = table.split(".")
    row = connection.execute(sql.SQL("select count(*) from {}").format(sql.Identifier(schema, name))).fetchone()
    assert row is not None
    return int(row[0])


def dump(database: Database, connection: Connection, moment: str, target: Path) -> None:
    """Writes the database as `snapshot` saw it, in pg_dump's compressed format. Raises DatabaseUnavailable."""
    others = "select nspname from pg_namespace where nspname !~ '^pg_' and nspname <> all(%s)"
    left_out = [str(name) for (name,) in connection.execute(others, (["information_schema", *DUMPED_SCHEMAS],))]
    command = [
        *(str(programs(connection.info.server_version // 10_000) / "pg_dump"), "--format=custom"),
        *("--no-owner", "--no-privileges", "--no-comments", "--no-publications", "--no-subscriptions"),
        *("--exclude-extension=*", "--exclude-table-data=orch_ledger.readers"),  # roles are the other server's
        *(f'--exclude-schema="{name}"' for name in left_out),
        *(f"--snapshot={moment}", f"--file={target}", f"--dbname={database.passwordless_url}"),
    ]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, check=False, env=_with_password(database)
    )
    if done.returncode:
        raise DatabaseUnavailable(
            f"{database}: pg_dump failed ({_reason(done.stderr)}); no backup was made, mend that and run it again"
        )


def load(database: Database, source: Path, afterwards: str) -> None:
    """Fills an empty database from a dump and runs the statements `afterwards`, all in one transaction.

    Raises DatabaseUnavailable, with nothing changed, when anything in it fails.
    """
    folder = programs(0)
    reading = [str(folder / "pg_restore"), "--no-owner", "--no-privileges", "--file=-", str(source)]
    writing = [
        *(str(folder / "psql"), "--no-psqlrc", "--quiet", "--output=/dev/null", "--single-transaction"),
        *("--set=ON_ERROR_STOP=1", "--file=-", f"--dbname={database.passwordless_url}"),
    ]
    with (
        subprocess.Popen(reading, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment()) as reader,
        subprocess.Popen(
            writing, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=_with_password(database)
        ) as writer,
    ):
        assert reader.stdout is not None
        assert writer.stdin is not None
        assert writer.stderr is not None
        try:
            _pour(reader.stdout, writer.stdin)
            ending = afterwards if reader.wait() == 0 else "do $$ begin raise 'the dump cannot be read'; end $$;"
            writer.stdin.write(ending.encode())
            writer.stdin.close()
        except BrokenPipeError:
            reader.kill()  # psql gave up, and says why below
        said = writer.stderr.read()
    if writer.returncode or reader.returncode:
        raise DatabaseUnavailable(f"{database}: the dump cannot be loaded: {_first_error(said)}; nothing was changed")


def _pour(source: IO[bytes], target: IO[bytes]) -> None:
    for _ in range(HEADER_LINES):
        line = source.readline()
        if not line.startswith(UNKNOWN_SETTINGS):
            target.write(line)
    shutil.copyfileobj(source, target)


def _with_password(database: Database) -> dict[str, str]:
    """Command lines are for all to see; the environment is not."""
    password = dict(database.parameters).get("password")
    return environment(PGPASSWORD=password) if password else environment()


def _version_of(program: Path) -> int:
    """The major version; 0 for a program that does not run here."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return 0
    match = re.search(r"\) (\d+)", done.stdout)
    return int(match[1]) if match else 0


def _reason(said: bytes) -> str:
    """Why pg_dump gave up: the server's words rather than its own, and never the statement that it ends with."""
    lines = said.decode(errors="replace").splitlines()
    marks = ("Error message from server: ", "error: ")
    return next((line.partition(mark)[2] for mark in marks for line in lines if mark in line), _last_line(said))


def _last_line(said: bytes) -> str:
    return (said.decode(errors="replace").strip().splitlines() or ["it gave no reason"])[-1]


def _first_error(said: bytes) -> str:
    lines = said.decode(errors="replace").splitlines()
    return next((line.partition("ERROR:")[2].strip() for line in lines if "ERROR:" in line), _last_line(said))
