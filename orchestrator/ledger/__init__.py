"""The truth about what ran: sweeps, trials, attempts, findings, decisions.

`upgrade` makes the tables; `Ledger` keeps them.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, text

from orchestrator.errors import DatabaseUnavailable
from orchestrator.ledger.models import SCHEMA, SweepState
from orchestrator.ledger.rows import AttemptRow, SweepRow, TrialRow
from orchestrator.ledger.store import Ledger

__all__ = ["HEAD", "AttemptRow", "Ledger", "SweepRow", "SweepState", "TrialRow", "revision", "upgrade"]

MIGRATIONS = Path(__file__).parent / "migrations"
HEAD = "0004"  # the newest file in migrations/versions; kept here so that the usual start need not import Alembic
LOCK_KEY = 0x6F726368_6C656467  # "orchledg"


def revision(connection: Connection) -> str | None:
    """The revision of the ledger's tables in this database; None where there are none."""
    if connection.scalar(text(f"select to_regclass('{SCHEMA}.alembic_version')")) is None:
        return None
    found: str | None = connection.scalar(text(f"select version_num from {SCHEMA}.alembic_version"))
    return found


def upgrade(connection: Connection) -> None:
    """Brings the ledger's tables to `HEAD` and commits. One short look when they are there; many may call it at once.

    Raises DatabaseUnavailable when the tables are newer than this program.
    """
    if revision(connection) == HEAD:
        connection.rollback()
        return
    connection.execute(text("select pg_advisory_xact_lock(:key)"), {"key": LOCK_KEY})
    # Alembic's version table lies in the schema. `if not exists` would ask for the right to create one regardless.
    if connection.scalar(text(f"select to_regnamespace('{SCHEMA}')")) is None:
        connection.execute(text(f"create schema {SCHEMA}"))
    found = revision(connection)
    if found is not None and found > HEAD:
        connection.rollback()
        raise DatabaseUnavailable(
            f"the ledger in this database has revision {found}; this orch knows {HEAD}: install a newer orch"
        )
    _run_alembic(connection)
    connection.commit()


def _run_alembic(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))  # read by configparser
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
