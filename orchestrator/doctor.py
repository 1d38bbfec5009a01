"""Looks at everything a sweep needs and says what is wrong, with the remedy. Mends nothing, except by `--init`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from orchestrator.errors import OrchError, PlaceUnusable
from orchestrator.places import why_unwritable
from orchestrator.reports.table import Table
from orchestrator.settings import artifact_root, journal_folder
from orchestrator.tracking.artifacts import local_folder
from orchestrator.workspace import Workspace, find_home, open_workspace

FREE_BYTES_NEEDED = 1_000_000_000  # one sweep's journal, artifacts and WAL with room to spare
CONNECTIONS_NEEDED = 10  # 4 of a node, 3 of a command, MLflow's UI and a psql beside them

Line = tuple[str, str, str]  # check, ok / wrong, what was seen and what to do


def examine(home: Path | None, init: bool) -> tuple[Table, bool]:
    """One line a check; False if any is wrong."""
    lines = list(_home_lines(home))
    try:
        workspace = open_workspace(home, allow_nonempty=init)
    except OrchError as error:
        lines.append(("database", "wrong", str(error)))
    else:
        lines += _database_lines(workspace)
    return Table(["check", "state", "what"], lines), all(state == "ok" for _, state, _ in lines)


def _home_lines(home_path: Path | None) -> Iterator[Line]:
    settings, home = find_home(home_path)
    try:
        home.ensure()
    except PlaceUnusable as error:
        yield "home", "wrong", str(error)
        return
    yield "home", "ok", str(home.path)
    places = {"disk (home)": home.path, "disk (journal)": journal_folder(settings, home)}
    root = artifact_root(settings, home)
    if (folder := local_folder(root)) is not None:
        places["disk (artifacts)"] = folder
    for name, place in places.items():
        yield _disk_line(name, place)
    if settings.mlflow_tracking_uri:
        yield "MLFLOW_TRACKING_URI", "ok", "is set and not used: orch writes to its own database"


def _disk_line(name: str, place: Path) -> Line:
    existing = next(folder for folder in (place, *place.parents) if folder.exists())
    if reason := why_unwritable(existing):
        return name, "wrong", f"{existing} cannot be written: {reason}"
    free = shutil.disk_usage(existing).free
    if free < FREE_BYTES_NEEDED:
        return name, "wrong", f"{free / 1e9:.2f} GB free at {existing}; a sweep wants {FREE_BYTES_NEEDED / 1e9:.0f} GB"
    return name, "ok", f"{free / 1e9:.0f} GB free at {existing}"


def _database_lines(workspace: Workspace) -> Iterator[Line]:
    kind = "embedded" if workspace.is_embedded else "given"
    with workspace.database.connect("orch doctor") as connection:
        yield "database", "ok", f"{kind} PostgreSQL {connection.info.server_version // 10000}: {workspace.database}"
        row = connection.execute(
            "select current_setting('max_connections')::int, count(*) from pg_stat_activity"
            " where backend_type = 'client backend'"
        ).fetchone()
    assert row is not None, "an aggregate has one row"
    most, used = row
    free = most - used
    state = "ok" if free >= CONNECTIONS_NEEDED else "wrong"
    yield "connections", state, f"{used} of {most} in use; a sweep needs up to {CONNECTIONS_NEEDED}"
    yield _tried("views", lambda: f"{len(workspace.query('select sweep from orch.sweeps')[1])} sweeps")
    yield "psql", "ok", workspace.psql_line


def _tried(name: str, look: Callable[[], str]) -> Line:
    try:
        return name, "ok", look()
    except OrchError as error:
        return name, "wrong", str(error)
