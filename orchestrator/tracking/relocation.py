"""The addresses of artifacts that MLflow's tables keep, and how they read when the artifacts have moved."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

ADDRESSES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
    ("trace_tags", "value"),  # `mlflow.artifactLocation`
)
RUN_ADDRESS_LENGTH = 200  # the width of `runs.artifact_uri`, MLflow's narrowest


def locations(connection: psycopg.Connection[Any]) -> list[str]:
    """Where the artifacts of every experiment lie, one address an experiment."""
    rows = connection.execute("select artifact_location from public.experiments order by experiment_id")
    return [str(location) for (location,) in rows if location]


def longest_below(connection: psycopg.Connection[Any], root: str) -> int:
    """How many characters the longest run's address has behind `root`."""
    query = "select max(length(artifact_uri)) from public.runs where starts_with(artifact_uri, %s)"
    row = connection.execute(query, (f"{root}/",)).fetchone()
    return (row[0] or len(root)) - len(root) if row else 0


def moved(old_root: str, new_root: str) -> str:
    """SQL that makes every address below `old_root` one below `new_root`; what lies elsewhere stays."""
    statement = sql.SQL(
        "update public.{table} set {column} = {new} || substr({column}, {start}) "
        "where starts_with({column}, {old} || '/');\n"
    )
    return "".join(
        statement.format(
            table=sql.Identifier(table),
            column=sql.Identifier(column),
            new=sql.Literal(new_root),
            old=sql.Literal(old_root),
            start=sql.Literal(len(old_root) + 1),
        ).as_string(None)
        for table, column in ADDRESSES
    )
