"""Writes a file whole or not at all, in the place of an older one. Does not judge whether that may be replaced."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from orchestrator.errors import OrchError, PlaceUnusable


class NotWritten(OrchError):
    """The disk filled or failed half-way; no file was made."""

    exit_code = 1


@contextmanager
def whole_file(target: Path) -> Iterator[BinaryIO]:
    """A file that is under its name, whole, when the block has ended, never otherwise; an older one stays till then.

    Raises PlaceUnusable, before anything is written, where there can be no such file; NotWritten for an OSError later,
    so the block opens no other file. Whatever else the block raises passes.
    """
    target, draft, file = _opened(target)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    except OSError as error:
        reason = error.strerror or error
        raise NotWritten(f"{target}  was not written: {reason}; mend that and run it again") from error
    finally:
        draft.unlink(missing_ok=True)


def _opened(target: Path) -> tuple[Path, Path, BinaryIO]:
    """Where links lead; a new file beside it, and its handle."""
    try:
        target = target.resolve()
        if target.exists() and not target.is_file():
            raise PlaceUnusable(f"{target}  is no file that could be replaced; name another, or - for standard output")
        draft = target.with_name(f".orch-{secrets.token_hex(4)}.part")
        return target, draft, draft.open("xb")
    except (OSError, RuntimeError) as error:  # Python 3.11 raises RuntimeError where links lead in a circle
        reason = getattr(error, "strerror", None) or "its links lead in a circle"
        raise PlaceUnusable(f"{target}  cannot be written: {reason}; name a file in another folder") from error
