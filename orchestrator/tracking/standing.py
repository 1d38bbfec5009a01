"""Brings MLflow's runs in line with trials whose command is gone, by SQL: nobody waits for MLflow's import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from orchestrator.trial import TrialState

SET_STATUS = """
    update public.runs as run
    set status = %(status)s, end_time = extract(epoch from trial.ended_at) * 1000
    from orch_ledger.trials as trial
    where trial.run_id = run.run_uuid and run.run_uuid = any(%(run_ids)s) and run.lifecycle_stage = 'active'
"""

SET_TAGS = """
    insert into public.tags as tag (run_uuid, key, value)
    select run.run_uuid, said.key, said.value
    from public.runs as run
    cross join (values ('orch.state', %(state)s), ('orch.reason', %(reason)s)) as said (key, value)
    where run.run_uuid = any(%(run_ids)s) and run.lifecycle_stage = 'active' and said.value <> ''
    order by run.run_uuid, said.key
    on conflict (key, run_uuid) do update set value = excluded.value
"""

DROP_REASON = "delete from public.tags where run_uuid = any(%(run_ids)s) and key = 'orch.reason' and %(reason)s = ''"


def mark_runs(connection: psycopg.Connection[Any], run_ids: Sequence[str], state: str, reason: str) -> None:
    """Gives the runs the MLflow status of a TrialState, its tags, and the end that the ledger has by then.

    In the caller's transaction.
    """
    if not run_ids:
        return
    status = TrialState(state).mlflow_status
    values = {"run_ids": list(run_ids), "status": status, "state": state, "reason": reason}
    for statement in (SET_STATUS, SET_TAGS, DROP_REASON):
        connection.execute(statement, values)
