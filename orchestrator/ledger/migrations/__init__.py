"""The ledger's schema, one file a change in `versions/`. Runs from code only; there is no alembic.ini."""
