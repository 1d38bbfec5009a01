"""The exception tree. Every error a user can cause is an `OrchError`, which prints as one block without a traceback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class OrchError(Exception):
    """Something the user can mend. `str(error)` is the whole message; `exit_code` is the command's."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One mistake of a sweep file. `where` is `file:line`, or a word such as `--set` when no file is involved."""

    where: str
    path: str
    message: str

    def __str__(self) -> str:
        return "  ".join(part for part in (self.where, self.path, self.message) if part)


class SpecError(OrchError):
    """A sweep file that cannot be run; lists all its mistakes at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class NotFound(OrchError):
    """A sweep, run or workload of that name does not exist."""


class AlreadyExists(OrchError):
    """The sweep's name is taken, or another command holds it."""


class DatabaseUnavailable(OrchError):
    """No PostgreSQL answers, or the one that answers cannot be used. Never contains a password."""


class DatabaseLost(DatabaseUnavailable):
    """The database went away while a sweep ran, and did not come back in time. What was trained is safe on disk."""

    exit_code = 1


class DatabaseLostWhenInterrupted(DatabaseLost):
    """A signal asked the sweep to stop, and the database did not come back for its last words."""

    exit_code = 130


class PlaceUnusable(OrchError):
    """A folder that orch must write cannot be made or written, or its disk is full."""


class WorkloadBroken(OrchError):
    """The class the user named cannot be used; the message holds the original traceback when its import raised."""


class ResourceError(OrchError):
    """The request asks for more than the cluster can ever give."""


class QueryError(OrchError):
    """The user's SQL was refused by PostgreSQL."""


class NoResult(OrchError):
    """The question was fine, but there is no finite run to answer it."""

    exit_code = 1
