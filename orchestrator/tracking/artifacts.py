"""Stores files with a run, at the run's artifact URI. Imports MLflow only where the store is not a local folder."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from urllib.parse import unquote, urlsplit


def local_folder(artifact_uri: str) -> Path | None:
    """The folder an artifact URI means on this host, or None for a remote store."""
    parts = urlsplit(artifact_uri)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return Path(artifact_uri) if parts.scheme == "" else None


def checkpoint_folder(artifact_uri: str) -> Path | None:
    """Where a run's checkpoints lie: beside its artifacts, where MLflow does not show them. None for a remote store."""
    folder = local_folder(artifact_uri)
    return folder and folder.with_name(f"{folder.name}-checkpoints")


def store_text(artifact_uri: str, text: str, name: str) -> None:
    """Keeps a text, in UTF-8, as the artifact `name`. Raises as `store_file` does."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "text"
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
        store_file(artifact_uri, path, name)


def _refuse_unsafe(name: str) -> None:
    """A name that leaves the run's folder, or that no file system, page or terminal shows as it is."""
    if Path(name).is_absolute() or ".." in Path(name).parts or not Path(name).name:
        raise ValueError(f"artifact name {name!r:.200} must stay inside the run's folder")
    if not name.isprintable():
        raise ValueError(f"artifact name {name!r:.200} holds a character that cannot be printed")


def store_file(artifact_uri: str, path: Path, name: str | None = None) -> None:
    """Keeps a copy of `path` as the artifact `name` (default: its own name; may contain folders).

    Raises ValueError for a name that is not safe, OSError when the store cannot be written.
    """
    name = name or path.name
    _refuse_unsafe(name)
    folder = local_folder(artifact_uri)
    if folder is not None:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.part")
        shutil.copyfile(path, draft)
        draft.replace(target)
        return
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    parent = str(Path(name).parent)
    repository = get_artifact_repository(artifact_uri)
    if Path(name).name == path.name:
        repository.log_artifact(str(path), None if parent == "." else parent)
        return
    with tempfile.TemporaryDirectory() as scratch:
        renamed = Path(scratch) / Path(name).name
        shutil.copyfile(path, renamed)
        repository.log_artifact(str(renamed), None if parent == "." else parent)
