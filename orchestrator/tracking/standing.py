"""How MLflow shows where a trial stands, and the SQL that says so of runs whose command is gone: needs no MLflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
    cross join unnest(%(keys)s::text[], %(values)s::text[]) as said (key, value)
    where run.run_uuid = any(%(run_ids)s) and run.lifecycle_stage = 'active'
    order by run.run_uuid, said.key
    on conflict (key, run_uuid) do update set value = excluded.value
"""

DROP_TAGS = "delete from public.tags where run_uuid = any(%(run_ids)s) and key = any(%(unsaid)s)"


class Standing(NamedTuple):
    """Where a trial stands, in its run's status and tags."""

    state: TrialState
    reason: str = ""  # of its end
    diverged_at: int | None = None
    attempt: int | None = None  # None: as before

    @property
    def status(self) -> str:
        return self.state.mlflow_status

    @property
    def tags(self) -> Mapping[str, str]:
        told = {"orch.state": self.state, "orch.attempt": self.attempt, **self._of_its_end}
        return {name: str(value) for name, value in told.items() if value not in ("", None)}

    @property
    def unsaid(self) -> list[str]:
        """The tags of an earlier end that are true no more."""
        return [name for name, value in self._of_its_end.items() if value in ("", None)]

    @property
    def _of_its_end(self) -> dict[str, Any]:
        return {"orch.reason": self.reason, "orch.diverged_at": self.diverged_at}


def mark_runs(connection: psycopg.Connection[Any], run_ids: Sequence[str], state: str, reason: str) -> None:
    """Has the runs show a TrialState and its reason, and the end that the ledger has by then.

    In the caller's transaction.
    """
    if not run_ids:
        return
    standing = Standing(TrialState(state), reason)
    said = {"keys": list(standing.tags), "values": list(standing.tags.values()), "unsaid": standing.unsaid}
    for statement in (SET_STATUS, SET_TAGS, DROP_TAGS):
        connection.execute(statement, {"run_ids": list(run_ids), "status": standing.status, **said})
