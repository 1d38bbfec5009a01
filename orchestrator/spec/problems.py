"""Collects every mistake of a sweep file, so that all are told at once. Never stops at the first."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from orchestrator.errors import Problem, SpecError


class Problems:
    """The mistakes seen so far; the same mistake is kept once, and nothing is said of what could not even be read."""

    def __init__(self) -> None:
        self._seen: dict[Problem, None] = {}
        self._unread: set[tuple[str, str]] = set()

    def add(self, where: str, path: str, message: str) -> None:
        if not any(place == where and f"{inner}.".startswith(f"{path}.") for place, inner in self._unread):
            self._seen[Problem(where, path, message)] = None

    def add_unread(self, where: str, path: str, message: str) -> None:
        """A value that is null from here on, at which others would stumble again."""
        self.add(where, path, message)
        self._unread.add((where, path))

    def __len__(self) -> int:
        return len(self._seen)

    def raise_if_any(self) -> None:
        """Raises SpecError with all problems in the order of the file; those of the command line come last."""
        if self._seen:
            raise SpecError(sorted(self._seen, key=_line_number))


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` was probably meant to be, or None."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), None)


def unknown_key(path: str, known: Iterable[str]) -> str:
    """The message for a key that nobody reads, with the nearest valid one or all of them."""
    known = list(known)
    near = nearest(path.rpartition(".")[2], known)
    hint = f"did you mean {near}?" if near else f"known: {', '.join(known)}"
    return f"unknown key {path}, {hint}"


def _line_number(problem: Problem) -> float:
    digits = problem.where.rpartition(":")[2]
    return int(digits) if digits.isdigit() else float("inf")
