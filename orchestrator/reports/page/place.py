"""Says where a page may be written: in the place of no file but an older report. Writes nothing."""

from __future__ import annotations

from pathlib import Path

from orchestrator.errors import PlaceUnusable
from orchestrator.reports.page import GENERATOR

MARK = f'<meta name="generator" content="{GENERATOR} '.encode()
HEAD_BYTES = 1_000  # where the mark is


def place_for(path: Path) -> Path:
    """Where `path` leads. Raises PlaceUnusable, before any work is done, for what cannot or must not be written."""
    try:
        target = path.resolve()
        if not target.parent.is_dir():
            raise PlaceUnusable(f"-o  {path}: there is no folder {target.parent}; make it, or name another file")
        if target.exists() and not target.is_file():
            raise PlaceUnusable(f"-o  {path} is no regular file; -o - writes to standard output")
        if target.exists() and not is_report(target):
            raise PlaceUnusable(f"-o  {path} exists and is no report of orch; move it away, or name another file")
    except (OSError, RuntimeError) as error:  # RuntimeError: of links that lead to each other
        reason = error.strerror if isinstance(error, OSError) else error
        raise PlaceUnusable(f"-o  {path}: {reason}; name another file") from None
    return target


def is_report(path: Path) -> bool:
    """Whether orch wrote the file; an empty one is nobody's."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    return not head or MARK in head
