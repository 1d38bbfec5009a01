"""Refuses a database other than the one that a command was sent to work on. Reads; creates nothing."""

from __future__ import annotations

from orchestrator.database import schema
from orchestrator.database.connection import open_database
from orchestrator.errors import DatabaseUnavailable
from orchestrator.settings import Home, Settings


def refuse_another(settings: Settings, home: Home) -> None:
    """Raises DatabaseUnavailable when the submitter of this command named a database and it is not ours.

    A job runs with the environment of the cluster's head: what it wrote elsewhere the submitter would never find.
    """
    expected = settings.expected_database
    if expected is None:
        return
    if settings.database_url is None:
        raise DatabaseUnavailable(
            "the cluster's head names no database: set ORCH_DATABASE_URL, to the one that the sweep was submitted "
            "with, in the environment in which Ray's head is started, and submit again"
        )
    database = open_database(settings, home)
    with database.connect("orch") as connection:
        found = schema.look_quickly(connection).notes.get(schema.IDENTITY)
    if found != expected:
        raise DatabaseUnavailable(
            f"the cluster's ORCH_DATABASE_URL ({database}) is not the database that the sweep was submitted with; "
            "set both to the same one, where Ray's head is started and where you type, and submit again"
        )
