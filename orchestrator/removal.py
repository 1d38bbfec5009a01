"""Archives or deletes a sweep in the ledger, in MLflow and among the views."""

from __future__ import annotations

import contextlib
from pathlib import Path

from orchestrator.database.borrow import borrowed
from orchestrator.database.view_catalog import drop_sweep_view
from orchestrator.errors import NotFound
from orchestrator.ledger.store import Ledger
from orchestrator.reports.source import stored_sweep
from orchestrator.settings import artifact_root
from orchestrator.tracking.runs import Runs
from orchestrator.workspace import open_workspace


def remove_sweep(home: Path | None, name: str, purge: bool, experiment_id: str | None = None) -> str:
    """Archives or deletes a sweep; its name is free again. Raises NotFound, or AlreadyExists, naming `orch cancel`,
    while it runs.

    An archived one can still be deleted, by the name that archiving gave it. `experiment_id`: only if it is that of
    the sweep which has the name by now.
    """
    workspace = open_workspace(home)
    engine = workspace.database.engine("orch rm")
    ledger = Ledger(engine)
    sweep = stored_sweep(ledger, workspace.query, name, archived=purge)
    if experiment_id is not None and sweep.experiment_id != experiment_id:
        raise NotFound(f"another sweep is called {name} by now")
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

            study = name.removesuffix(f"~{sweep.id}")  # archiving has left it its name
            if ledger.find_sweep(study) is None:  # else it is by now that of the sweep which took the name
                unmirror(workspace.database.url, study)
        else:
            ledger.archive(sweep.id)
        with borrowed(engine) as connection:
            drop_sweep_view(connection, name)
    if purge:
        return f"sweep {name} is deleted with its runs and artifacts"
    return f"sweep {name} is archived as {archive_name}; the name {name} is free again"
