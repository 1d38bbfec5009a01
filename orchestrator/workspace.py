"""Opens what a command needs: the home folder, the database with its schema, the read-only role. Runs no sweep."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

from orchestrator import __version__, ledger
from orchestrator.database import embedded, reader, schema, view_catalog
from orchestrator.database.connection import Database, open_database
from orchestrator.database.expected import refuse_another
from orchestrator.ledger.lease import holders, reap
from orchestrator.reports.source import Query
from orchestrator.settings import Home, Settings, artifact_root, journal_folder, remote_journal_folder
from orchestrator.tracking.standing import mark_runs


@dataclass(frozen=True)
class Workspace:
    """One home folder and one database that is ready to use."""

    settings: Settings
    home: Home
    database: Database
    identity: str  # of the database's contents: a journal is written into the one it was kept for, never another

    @property
    def is_embedded(self) -> bool:
        return self.settings.database_url is None

    @property
    def psql_line(self) -> str:
        """What a person types to reach the database; the password comes from its file, or psql asks for it."""
        password_file = self.home.secret_file("postgres") if self.is_embedded else None
        return self.database.psql_line(password_file=password_file)

    @property
    def journal(self) -> Path:
        return journal_folder(self.settings, self.home) / self.identity

    @property
    def remote_journal(self) -> Path:
        """The journal on the nodes of a cluster."""
        return remote_journal_folder(self.settings) / self.identity

    @property
    def journals(self) -> list[Path]:
        """Where this host keeps points for the database: recorders of its own sweeps, and those of a cluster's node."""
        return list(dict.fromkeys((self.journal, self.remote_journal)))

    def reap(self) -> None:
        """Marks what dead commands left running as lost."""
        with self.database.connect("orch") as connection:
            reap(connection, mark_runs)

    def is_dead(self, command: str) -> bool:
        """True for a holder (`<pid>@<host>`) that died on this machine and that `reap` could not mark."""
        with self.database.connect("orch") as connection:
            return any(one.name == command and one.is_gone for one in holders(connection))

    def revive_database(self) -> None:
        """Starts the embedded server again if it was killed. Raises DatabaseUnavailable when that fails."""
        if self.is_embedded:
            embedded.revive(self.home)

    @cached_property
    def query(self) -> Query:
        """Runs one read-only statement as the reading role."""
        return functools.partial(reader.run_query, self.reader_database)

    @cached_property
    def reader_database(self) -> Database:
        """How to log in as the role that can read schema `orch` and nothing else."""
        if self.settings.reader_url is not None:
            return Database.from_url(self.settings.reader_url.get_secret_value())
        secret = dict(self.database.parameters).get("password") or self.home.secret("reader")
        with self.database.connect("orch") as connection:
            login = reader.ensure_reader(connection, secret, is_server_ours=self.is_embedded)
            return reader.reader_database(self.database, login)


def find_home(home: Path | None) -> tuple[Settings, Home]:
    settings = Settings() if home is None else Settings(home=home)
    return settings, Home.find(settings)


def open_workspace(home_path: Path | None, *, allow_nonempty: bool = False) -> Workspace:
    """Starts the embedded server if need be and brings the schema up to date. Raises DatabaseUnavailable."""
    settings, home = find_home(home_path)
    if settings.mlflow_tracking_uri:
        print("note: MLFLOW_TRACKING_URI is set; orch does not use it, it writes to its own database", file=sys.stderr)
    refuse_another(settings, home)
    database = open_database(settings, home)
    schema.prepare(
        database,
        fingerprint(),
        [
            functools.partial(_create_mlflow_tables, artifact_root(settings, home)),
            _upgrade_ledger,
            _apply_views,
            schema.name_contents,
        ],
        expected_revision=_expected_revision,
        allow_nonempty=allow_nonempty,
        password_file=home.secret_file("postgres") if settings.database_url is None else None,
    )
    with database.connect("orch") as connection:
        view_catalog.apply(connection)  # one short look, unless somebody dropped schema orch since
        identity = schema.identity(connection)
    workspace = Workspace(settings, home, database, identity)
    workspace.reap()
    return workspace


def _create_mlflow_tables(root: str, database: Database) -> None:
    from orchestrator.tracking import mlflow_schema  # imports MLflow: only a first start needs it

    mlflow_schema.create(database.url, root)


def _expected_revision() -> str:
    from orchestrator.tracking import mlflow_schema

    return mlflow_schema.expected_revision()


def _upgrade_ledger(database: Database) -> None:
    with database.engine("orch schema").connect() as connection:
        ledger.upgrade(connection)


def _apply_views(database: Database) -> None:
    with database.connect("orch schema") as connection:
        view_catalog.apply(connection)


def fingerprint() -> str:
    """Names the schema this program makes; a database that carries it needs no further look."""
    parts: Sequence[str] = (__version__, version("mlflow"), ledger.HEAD, schema.IDENTITY, view_catalog.files_digest())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def open_for_reading(home: Path | None) -> Query:
    """What a reading command needs: one function that runs a read-only statement."""
    return open_workspace(home).query
