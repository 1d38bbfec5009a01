"""Where the members of a population leave their states for each other. Knows nothing of what is in a state.

A member's three newest milestones are kept: a scheduler names states that are at most so many milestones older than
the newest of their writer as `schedulers.population` says (one), and the writer may have gone on meanwhile.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from orchestrator.tracking.artifacts import local_folder

KEPT_MILESTONES = 3


def population_folder(artifact_uri: str) -> Path | None:
    """The one of the sweep to which the run with these artifacts belongs; None where the store is remote.

    Artifacts lie at `<sweep>/<run id>/artifacts` or, where that is too long for MLflow, at `<sweep>/<short id>`.
    """
    folder = local_folder(artifact_uri)
    if folder is None:
        return None
    run = folder.parent if folder.name == "artifacts" else folder
    return run.parent / "population"


def state_path(folder: Path, number: int, step: int) -> Path:
    """Where the trial of that number leaves its state after a step."""
    return folder / f"trial-{number}.step-{step}"


def leave(folder: Path, number: int, step: int, path: Path) -> None:
    """Makes the whole file at `path` the trial's state of this milestone. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = state_path(folder, number, step)
    draft = place.with_name(f".{place.name}")
    draft.unlink(missing_ok=True)
    try:
        os.link(path, draft)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, draft)
    draft.replace(place)
    for old in _of(folder, number)[:-KEPT_MILESTONES]:
        old.unlink(missing_ok=True)


def disband(folder: Path) -> None:
    """Removes all states: nobody will copy any more."""
    shutil.rmtree(folder, ignore_errors=True)


def _of(folder: Path, number: int) -> list[Path]:
    """A member's states, the oldest milestone first."""
    found = {
        int(match[1]): path
        for path in folder.iterdir()
        if (match := re.fullmatch(rf"trial-{number}\.step-(\d+)", path.name))
    }
    return [found[step] for step in sorted(found)]
