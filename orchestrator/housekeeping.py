"""Finds what nobody needs any more, shows it, and removes it. Touches nothing that a command works on, that is younger
than asked, or that carries no mark of ours: a tag in MLflow, a place in our experiments, the names that we give.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.database.embedded import SERVER_UID
from orchestrator.ledger import leftovers
from orchestrator.ledger.leftovers import Leftover
from orchestrator.locks import is_free
from orchestrator.removal import remove_sweep
from orchestrator.reports.table import Table
from orchestrator.settings import artifact_root
from orchestrator.tracking.artifacts import checkpoint_folder, local_folder
from orchestrator.tracking.journal import Journal, backlog_of, is_abandoned
from orchestrator.trial import TrialState
from orchestrator.workspace import Workspace, open_workspace

if TYPE_CHECKING:
    from orchestrator.tracking.runs import Runs

RUN_FOLDER = re.compile(r"[0-9a-f]{32}|[0-9a-f]{12}(-checkpoints)?")
EXPERIMENT_FOLDER = re.compile(r"[a-z][a-z0-9_]*-[0-9a-f]{6}|[0-9a-f]{8}")
IDENTITY = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
JOURNAL = re.compile(r"\.?[^~]+~\d+~[0-9a-f]{8}")
OUR_SHORT_FOLDER = re.compile(rf"orch-({os.getuid()}-)?[0-9a-f]{{10}}(-ray)?")
LIVE_LOGS = ("postgres.log",)
BEING_MADE_S = 3600.0  # kept for so long, whatever is asked, where a command may just be making it


@dataclass(frozen=True)
class Wishes:
    """What the person asked for. Without the last three, such things are listed and kept."""

    older_than_s: float
    dry_run: bool = False
    archived: bool = False
    checkpoints: bool = False
    foreign_journals: bool = False


@dataclass
class Pile:
    """Things of one kind. `kept` counts, by reason, those that look alike and stay."""

    kind: str
    things: list[tuple[int, Callable[[], None]]] = field(default_factory=list)  # bytes, and what removes it
    kept: dict[str, tuple[int, int]] = field(default_factory=dict)  # number, bytes

    def add(self, num_bytes: int, remove: Callable[[], None], keep_because: str = "") -> None:
        if keep_because:
            self.keep(keep_because, num_bytes)
        else:
            self.things.append((num_bytes, remove))

    def keep(self, reason: str, num_bytes: int) -> None:
        number, before = self.kept.get(reason, (0, 0))
        self.kept[reason] = (number + 1, before + num_bytes)

    def clear(self) -> None:
        """Removes the things. One that cannot be removed counts as kept, for the reason, and holds up no other."""
        done = []
        for num_bytes, remove in self.things:
            try:
                with contextlib.suppress(FileNotFoundError):  # somebody was faster: it is gone all the same
                    remove()
            except Exception as error:
                self.keep(_in_a_line(error), num_bytes)
            else:
                done.append((num_bytes, remove))
        self.things = done

    def line(self, dry_run: bool) -> tuple[str, int, str, str, str]:
        num_bytes = sum(size for size, _ in self.things)
        kept = "; ".join(f"{number} ({_size(size)}) {reason}" for reason, (number, size) in self.kept.items())
        return self.kind, len(self.things), _size(num_bytes), "would go" if dry_run else "removed", kept


def tidy(home: Path | None, wishes: Wishes) -> Table:
    """One line a kind: how many, how large, and what was kept and why. Removes them unless it is a dry run."""
    keeper = Housekeeper(open_workspace(home), home, wishes)
    piles = [*keeper.piles()]
    if not wishes.dry_run:
        for pile in piles:
            pile.clear()
    notes = ["nothing was removed; without --dry-run it would be"] if wishes.dry_run else []
    return Table(["kind", "number", "size", "what", "kept"], [pile.line(wishes.dry_run) for pile in piles], notes=notes)


class Housekeeper:
    """Looks through one workspace and this host. Removes nothing itself: its piles do."""

    def __init__(self, workspace: Workspace, home: Path | None, wishes: Wishes) -> None:
        self._workspace, self._home, self._wishes = workspace, home, wishes
        self._root = artifact_root(workspace.settings, workspace.home).rstrip("/")

    def piles(self) -> Iterator[Pile]:
        """MLflow's before the folders that belong to it."""
        root = local_folder(self._root)  # looked at before the database is asked: a folder never comes before its row
        sweeps = _folders(root, EXPERIMENT_FOLDER)
        with self._workspace.database.connect("orch gc") as connection:
            older_than_s = self._wishes.older_than_s
            experiments = leftovers.leftovers(connection, leftovers.DELETED_EXPERIMENTS, older_than_s)
            archived = leftovers.leftovers(connection, leftovers.ARCHIVED_SWEEPS, older_than_s)
            runs = leftovers.leftovers(connection, leftovers.DELETED_RUNS, older_than_s)
            states = leftovers.states(connection)
            locations = leftovers.our_locations(connection)
            free = [location for location, is_held in locations.items() if not is_held]
            folders = list(_run_folders(free))
            names = [*(name for name, _ in folders), *(folder.name for folder in sweeps)]
            unknown = leftovers.unknown(connection, names)
        yield self._deleted_experiments(experiments)
        yield self._archived_sweeps(archived)
        yield self._deleted_runs(runs)
        orphans = [folder for name, folder in folders if name in unknown]
        yield self._orphan_artifacts(orphans, [folder for folder in sweeps if folder.name in unknown])
        yield self._states(states)
        yield self._journals()
        yield self._rejected_rows()
        yield self._short_folders()
        yield self._logs()

    # What MLflow and the ledger know

    def _deleted_experiments(self, found: Iterable[Leftover]) -> Pile:
        pile = Pile("sweeps deleted in MLflow")
        for one in found:
            pile.add(_size_at(one.artifact_uri), partial(self._purge, one), self._reason(one))
        return pile

    def _archived_sweeps(self, found: Iterable[Leftover]) -> Pile:
        pile = Pile("archived sweeps")
        for one in found:
            reason = self._reason(one) if self._wishes.archived else "removed only with --archived"
            pile.add(_size_at(one.artifact_uri), partial(self._purge, one), reason)
        return pile

    def _deleted_runs(self, found: Iterable[Leftover]) -> Pile:
        pile = Pile("runs deleted in MLflow")
        for one in found:
            size = _size_at(one.artifact_uri) + _size_of(one.artifact_uri and checkpoint_folder(one.artifact_uri))
            pile.add(size, partial(self._purge_run, one), self._reason(one))
        return pile

    def _reason(self, one: Leftover) -> str:
        if one.is_held:
            return "in use by a command"
        return "" if one.is_old else self._too_young

    @property
    def _too_young(self) -> str:
        hours = self._wishes.older_than_s / 3600
        return f"younger than {hours / 24:g} days" if hours >= 48 else f"younger than {hours:.3g} hours"

    def _purge(self, one: Leftover) -> None:
        if one.sweep is None:
            self._runs.purge_experiment(one.id)
        else:
            remove_sweep(self._home, one.sweep, purge=True)

    def _purge_run(self, one: Leftover) -> None:
        self._runs.purge_run(one.id)
        with self._workspace.database.connect("orch gc") as connection:
            leftovers.forget_run(connection, one.id)
        folder = local_folder(one.artifact_uri) if one.artifact_uri else None
        if folder and RUN_FOLDER.fullmatch(folder.parent.name) and not any(folder.parent.iterdir()):
            folder.parent.rmdir()

    @cached_property
    def _runs(self) -> Runs:
        from orchestrator.tracking.runs import Runs  # imports MLflow: only what removes something waits for it

        return Runs(self._workspace.database.url, self._root)

    # Folders

    def _orphan_artifacts(self, of_runs: Sequence[Path], of_sweeps: Sequence[Path]) -> Pile:
        """Of sweeps that a command works on nothing is among `of_runs`: what it makes has no row yet."""
        pile = Pile("artifacts of no run")
        if local_folder(self._root) is None:
            pile.keep(f"store {self._root} is not looked through", 0)
        for folder in of_runs:
            self._add_folder(pile, folder)
        for folder in of_sweeps:
            self._add_folder(pile, folder, self._why_not_ours)
        return pile

    @property
    def _why_not_ours(self) -> str:
        """Below `.orch` an embedded database has its artifacts alone; elsewhere several databases may share a root."""
        has_root_alone = self._workspace.is_embedded and self._workspace.settings.artifact_root is None
        return "" if has_root_alone else "may belong to another database"

    def _states(self, found: Iterable[tuple[TrialState, str, bool]]) -> Pile:
        pile = Pile("checkpoints of trials that are over")
        for state, uri, is_kept in found:
            folder = checkpoint_folder(uri)
            if folder is None or not folder.is_dir():
                continue
            reason = "of failed trials, which go on from them" if state is TrialState.FAILED else ""
            reason = reason or ("kept on request (keep_checkpoints: true)" if is_kept else "")
            is_wanted = reason and not self._wishes.checkpoints
            self._add_folder(pile, folder, f"{reason}; removed only with --checkpoints" if is_wanted else "")
        return pile

    def _journals(self) -> Pile:
        pile = Pile("journals")
        for ours in self._workspace.journals:
            for folder in _folders(ours, JOURNAL):
                self._add_journal(pile, folder, is_ours=True)
        for foreign in self._foreign_journals():
            for folder in _folders(foreign, JOURNAL):
                self._add_journal(pile, folder, is_ours=False)
            if _age_s(foreign) >= BEING_MADE_S and not any(foreign.iterdir()):
                pile.add(0, foreign.rmdir)
        return pile

    def _foreign_journals(self) -> list[Path]:
        """For databases that this home had before. A node's folder is shared by all homes of a user: not looked at."""
        ours = self._workspace.journal
        return [folder for folder in _folders(ours.parent, IDENTITY) if folder != ours]

    def _add_journal(self, pile: Pile, folder: Path, is_ours: bool) -> None:
        waiting = backlog_of(folder)
        if self._is_young(folder):
            pile.keep(self._too_young, waiting)
        elif not is_abandoned(folder):
            pile.keep("of a living recorder, or of another host", waiting)
        elif waiting == 0:
            pile.add(0, partial(_remove_drained, folder))
        elif is_ours:
            pile.keep("with points for this database: the next sweep writes them", waiting)
        else:
            reason = "" if self._wishes.foreign_journals else "with points for another database; --foreign-journals"
            pile.add(waiting, partial(shutil.rmtree, folder), reason)

    def _rejected_rows(self) -> Pile:
        pile = Pile("rows that the database refused")
        for folder in (*self._workspace.journals, *self._foreign_journals()):
            if (path := folder / "rejected.jsonl").exists():
                self._add_file(pile, path)
        return pile

    def _short_folders(self) -> Pile:
        pile = Pile("folders of dead commands")
        for folder in _folders(self._workspace.home.short_folder.parent, OUR_SHORT_FOLDER):
            with contextlib.suppress(FileNotFoundError):  # its command has just ended
                self._add_short_folder(pile, folder)
        return pile

    def _add_short_folder(self, pile: Pile, folder: Path) -> None:
        if folder.lstat().st_uid not in (os.getuid(), SERVER_UID):
            return
        for session in _folders(folder, re.compile(r"\d+")):
            if is_free(session):
                is_new = _age_s(session) < BEING_MADE_S
                self._add_folder(pile, session, "of the last hour: may be just being made" if is_new else "")
        if not self._is_young(folder) and _age_s(folder) >= BEING_MADE_S and not any(folder.iterdir()):
            pile.add(0, folder.rmdir)

    def _logs(self) -> Pile:
        pile = Pile("old logs")
        folder = self._workspace.home.path / "logs"
        for path in sorted(folder.glob("*.log*")) if folder.is_dir() else ():
            if path.name not in LIVE_LOGS:
                self._add_file(pile, path, "" if is_free(path) else "of what runs in the background")
        return pile

    def _add_folder(self, pile: Pile, folder: Path, keep_because: str = "") -> None:
        reason = keep_because or (self._too_young if self._is_young(folder) else "")
        pile.add(_size_of(folder), partial(shutil.rmtree, folder), reason)

    def _add_file(self, pile: Pile, path: Path, keep_because: str = "") -> None:
        reason = keep_because or (self._too_young if self._is_young(path) else "")
        pile.add(_size_of_file(path), path.unlink, reason)

    def _is_young(self, path: Path) -> bool:
        """Whether anything in it was written more recently than asked."""
        return _age_s(path) < self._wishes.older_than_s


def _in_a_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _remove_drained(folder: Path) -> None:
    if (journal := Journal.adopt(folder)) is not None:  # nobody can be writing into it now
        journal.close()


def _run_folders(locations: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """(run id, or its beginning, folder) below the experiments' local folders."""
    for location in locations:
        folder = local_folder(location)
        for path in _folders(folder, RUN_FOLDER) if folder else ():
            yield path.name.removesuffix("-checkpoints"), path


def _folders(parent: Path | None, name: re.Pattern[str]) -> list[Path]:
    """Folders, links not followed, whose name fits; none where there is no parent."""
    if parent is None or not parent.is_dir():
        return []
    return [
        path
        for path in sorted(parent.iterdir())
        if name.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    ]


def _age_s(path: Path) -> float:
    """Since anything in it was written; 0 for what has just gone."""
    now = time.time()
    return now - max(_times(path), default=now)


def _times(path: Path) -> Iterator[float]:
    with contextlib.suppress(FileNotFoundError):  # a living recorder's journal comes and goes
        yield path.lstat().st_mtime
    for place, folders, names in os.walk(path):
        for name in (*folders, *names):
            with contextlib.suppress(FileNotFoundError):
                yield Path(place, name).lstat().st_mtime


def _size_at(uri: str | None) -> int:
    return _size_of(local_folder(uri)) if uri else 0


def _size_of_file(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.lstat().st_size
    return 0


def _size_of(folder: Path | str | None) -> int:
    """Bytes of the files below; 0 where there is no such folder here."""
    total = 0
    for place, _, names in os.walk(folder) if folder else ():
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += Path(place, name).lstat().st_size
    return total


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
