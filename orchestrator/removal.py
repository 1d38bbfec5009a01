"""Archives or deletes a sweep in the ledger, in MLflow and among the views."""

from __future__ import annotations

import contextlib
from pathlib import Path

from orchestrator.database.borrow import borrowed
from orchestrator.database.view_catalog import drop_sweep_view
from orchestrator.errors import NotFound
from orchestrator.ledger.store import Ledger
from orchestrator.reports.source import sweep_facts
from orchestrator.settings import artifact_root
from orchestrator.tracking.runs import Runs
from orchestrator.workspace import open_workspace


def remove_sweep(home: Path | None, name: str, purge: bool) -> str:
    """Archives or deletes a sweep; its name is free again. Raises NotFound, or AlreadyExists, naming `orch cancel`,
    while it runs.

    An archived one can still be deleted, by the name that archiving gave it.
    """
    workspace = open_workspace(home)
    engine = workspace.database.engine("orch rm")
    ledger = Ledger(engine)
    sweep = ledger.find_sweep(name)
    if sweep is None or (sweep.archived_at is not None and not purge):
        sweep_facts(workspace.query, name)  # says which names there are
    assert sweep is not None, "the view has just shown it"
    runs = Runs(workspace.database.url, artifact_root(workspace.settings, workspace.home))
    archive_name = f"{name}~{sweep.id}"
    with ledger.hold(sweep.id):  # MLflow first: what fails half-way can be typed again
        if sweep.experiment_id:
            with contextlib.suppress(NotFound):  # somebody deleted it for good
                if purge:
                    runs.purge_experiment(sweep.experiment_id)
                else:
                    runs.archive_experiment(sweep.experiment_id, archive_name)
        if purge:
            ledger.purge(sweep.id)
            from orchestrator.search.mirror import unmirror  # Optuna takes half a second to import

            unmirror(workspace.database.url, name)
        else:
            ledger.archive(sweep.id)
        with borrowed(engine) as connection:
            drop_sweep_view(connection, name)
    if purge:
        return f"sweep {name} is deleted with its runs and artifacts"
    return f"sweep {name} is archived as {archive_name}; the name {name} is free again"
