"""Tries to write where a sweep will write, before anything of it exists. Leaves nothing behind but empty folders."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from orchestrator.errors import PlaceUnusable
from orchestrator.settings import Home, Settings, artifact_root, journal_folder
from orchestrator.tracking.artifacts import local_folder

PROBE_BYTES = 1 << 20  # less free space than this is none: a few trials' points and artifacts fill it


def check_places(settings: Settings, home: Home) -> None:
    """Raises PlaceUnusable, with every folder that cannot be written and the setting that names another."""
    places = {"ORCH_JOURNAL_DIR": journal_folder(settings, home)}
    if (artifacts := local_folder(artifact_root(settings, home))) is not None:
        places["ORCH_ARTIFACT_ROOT"] = artifacts
    wrong = [
        f"{folder}  cannot be written: {reason}; mend that, or set {variable} to another folder"
        for variable, folder in places.items()
        if (reason := why_unwritable(folder))
    ]
    if wrong:
        raise PlaceUnusable("\n".join(wrong))


def why_unwritable(folder: Path) -> str:
    """Why a mebibyte cannot be written into the folder, which is made if it is missing; empty if it can."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return ""
