"""Folders and names that outlive a power cut, as a file that was flushed does. Writes no file."""

from __future__ import annotations

import os
from pathlib import Path


def make_folder(path: Path) -> None:
    """The folder and those above it, for our eyes only; what was made stays. Raises OSError."""
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in new:
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Waits until the names in the folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
