"""Alembic's entry: migrates on the connection that `orchestrator.ledger.upgrade` hands in. No offline mode."""

from __future__ import annotations

from alembic import context

from orchestrator.ledger.models import SCHEMA, Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table_schema=SCHEMA,
)
with context.begin_transaction():
    context.run_migrations()
