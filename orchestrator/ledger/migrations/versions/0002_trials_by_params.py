"""An index that finds a trial by its parameters.

Revision ID: 0002
"""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("create index trials_params on orch_ledger.trials using hash (params)")


def downgrade() -> None:
    op.execute("drop index orch_ledger.trials_params")
