"""Builds MLflow's tables in schema `public`, by MLflow's own migrations. Never upgrades a schema that exists.

Importing this module imports MLflow (about 1.5 s), so commands that only read do without it.
"""

from __future__ import annotations

import sqlalchemy
from mlflow.store.db import utils as mlflow_db
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from sqlalchemy.engine import make_url
from sqlalchemy.pool import NullPool

from orchestrator.settings import LIVENESS

SEARCH_PATH = "-c search_path=public"


def mlflow_uri(url: str) -> str:
    """The address under which MLflow uses the database: psycopg 3, and unqualified names always mean schema public.

    Postgres' default path would take MLflow's tables into a schema named like the user, if there is one.
    """
    parsed = make_url(url).set(drivername="postgresql+psycopg")
    given = parsed.query.get("options", "")
    options = " ".join([*([given] if isinstance(given, str) else given), SEARCH_PATH]).strip()
    watchful = {**{name: str(value) for name, value in LIVENESS.items()}, **parsed.query, "options": options}
    return parsed.set(query=watchful).render_as_string(hide_password=False)


def create(url: str, artifact_root: str | None = None) -> None:
    """Creates MLflow's tables where they are missing, and experiment 0, whose artifacts would lie in `artifact_root`.

    The caller holds the lock that keeps two first starts apart; MLflow's migrations open two connections.
    """
    uri = mlflow_uri(url)
    engine = sqlalchemy.create_engine(uri, poolclass=NullPool)
    if not mlflow_db._all_tables_exist(engine):
        mlflow_db._initialize_tables(engine)
    if artifact_root is not None:
        SqlAlchemyStore(uri, artifact_root).engine.dispose()


def expected_revision() -> str:
    """The revision of the schema that the installed MLflow works with."""
    return str(mlflow_db._get_latest_schema_revision())
