"""Puts a page where the person wants it, whole or not at all. Replaces no file that is not a report."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
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
    except OSError as error:
        raise PlaceUnusable(f"-o  {path}: {error.strerror}; name another file") from None
    return target


def is_report(path: Path) -> bool:
    """Whether orch wrote the file; an empty one is nobody's."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    return not head or MARK in head


def write(target: Path, text: str) -> None:
    """Beside it first, then in its place. Raises PlaceUnusable; a full disk raises OSError, which `orch` tells."""
    draft = None
    try:
        descriptor, draft = tempfile.mkstemp(prefix=".orch-report-", dir=target.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(draft, 0o644)  # mkstemp's 0600 is not for a page that is sent around
        os.replace(draft, target)
    except PermissionError as error:
        raise PlaceUnusable(f"-o  {target}: {error.strerror}; name a file in another folder") from None
    finally:
        if draft is not None:
            with suppress(FileNotFoundError):  # it has its place
                os.unlink(draft)
