"""Finds what nobody needs any more, shows it, and removes it. Touches nothing that a command works on, that is younger
than asked, or that carries no mark of ours: a tag in MLflow, a place in our experiments, the names that we give.

Between looking and removing others go on working, so each thing is asked about again when its turn comes; what a sweep
could need, while nobody can begin to drive that sweep.
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
from orchestrator.errors import OrchError
from orchestrator.ledger import leftovers
from orchestrator.ledger.leftovers import Leftover, Location, States
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

Why = Callable[[], str]  # the reason to keep something, as things are now; empty: it may go
IN_USE = "in use by a command"
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


class StillNeeded(OrchError):
    """Something was of no use when it was looked at, and is by now."""


@dataclass(frozen=True)
class Thing:
    """What nobody needs, as far as one saw."""

    num_bytes: int
    remove: Callable[[], None]
    why_kept: Why


def _needless() -> str:
    return ""


@dataclass
class Pile:
    """Things of one kind. `kept` counts, by reason, those that look alike and stay."""

    kind: str
    things: list[Thing] = field(default_factory=list)
    kept: dict[str, tuple[int, int]] = field(default_factory=dict)  # number, bytes

    def add(self, num_bytes: int, remove: Callable[[], None], why_kept: Why = _needless) -> None:
        """`why_kept` is asked now, and again before the thing is removed."""
        if reason := why_kept():
            self.keep(reason, num_bytes)
        else:
            self.things.append(Thing(num_bytes, remove, why_kept))

    def keep(self, reason: str, num_bytes: int) -> None:
        number, before = self.kept.get(reason, (0, 0))
        self.kept[reason] = (number + 1, before + num_bytes)

    def clear(self) -> None:
        """Removes the things. One that cannot be removed counts as kept, for the reason, and holds up no other."""
        done = []
        for thing in self.things:
            try:
                if reason := thing.why_kept():
                    raise StillNeeded(reason)
                with contextlib.suppress(FileNotFoundError):  # somebody was faster: it is gone all the same
                    thing.remove()
            except Exception as error:
                self.keep(_in_a_line(error), thing.num_bytes)
            else:
                done.append(thing)
        self.things = done

    def line(self, dry_run: bool) -> tuple[str, int, str, str, str]:
        num_bytes = sum(thing.num_bytes for thing in self.things)
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
            free = [location for location in leftovers.our_locations(connection) if not location.is_held]
            folders = list(_run_folders(free))
            names = [*map(_name_of, (folder for folder, _ in folders)), *(folder.name for folder in sweeps)]
            unknown = leftovers.unknown(connection, names)
        yield self._deleted_experiments(experiments)
        yield self._archived_sweeps(archived)
        yield self._deleted_runs(runs)
        orphans = [(folder, sweep_id) for folder, sweep_id in folders if _name_of(folder) in unknown]
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
            remove = partial(self._purge, leftovers.DELETED_EXPERIMENTS, one)
            pile.add(_size_at(one.artifact_uri), remove, partial(self._reason, one))
        return pile

    def _archived_sweeps(self, found: Iterable[Leftover]) -> Pile:
        pile = Pile("archived sweeps")
        for one in found:
            if self._wishes.archived:
                remove = partial(self._purge, leftovers.ARCHIVED_SWEEPS, one)
                pile.add(_size_at(one.artifact_uri), remove, partial(self._reason, one))
            else:
                pile.keep("removed only with --archived", _size_at(one.artifact_uri))
        return pile

    def _deleted_runs(self, found: Iterable[Leftover]) -> Pile:
        pile = Pile("runs deleted in MLflow")
        for one in found:
            size = _size_at(one.artifact_uri) + _size_of(one.artifact_uri and checkpoint_folder(one.artifact_uri))
            pile.add(size, partial(self._purge_run, one), partial(self._reason, one))
        return pile

    def _reason(self, one: Leftover) -> str:
        if one.is_held:
            return IN_USE
        return "" if one.is_old else self._too_young

    @property
    def _too_young(self) -> str:
        hours = self._wishes.older_than_s / 3600
        return f"younger than {hours / 24:g} days" if hours >= 48 else f"younger than {hours:.3g} hours"

    def _purge(self, query: str, one: Leftover) -> None:
        """MLflow knows no lease of ours: somebody who restores an experiment in this very moment comes too late."""
        runs = self._runs  # imports MLflow: nothing slow may come after the last look
        with self._workspace.database.connect("orch gc") as connection:
            self._refuse_changed(connection, query, one)
        if one.sweep is None:
            runs.purge_experiment(one.id)
        else:
            remove_sweep(self._home, one.sweep, purge=True, experiment_id=one.id)

    def _purge_run(self, one: Leftover) -> None:
        runs = self._runs
        with self._undriven(one.sweep_id) as connection:
            self._refuse_changed(connection, leftovers.DELETED_RUNS, one)
            runs.purge_run(one.id)
            leftovers.forget_run(connection, one.id)
        folder = local_folder(one.artifact_uri) if one.artifact_uri else None
        if folder and RUN_FOLDER.fullmatch(folder.parent.name) and not any(folder.parent.iterdir()):
            folder.parent.rmdir()

    @contextlib.contextmanager
    def _undriven(self, sweep_id: int | None) -> Iterator[leftovers.Connection]:
        """Nobody begins to drive the sweep until the block ends: they wait. Raises StillNeeded where somebody does."""
        with self._workspace.database.connect("orch gc") as connection:
            if sweep_id is not None and not leftovers.lock_undriven(connection, sweep_id):
                raise StillNeeded(IN_USE)
            yield connection

    def _refuse_changed(self, connection: leftovers.Connection, query: str, one: Leftover) -> None:
        found = leftovers.leftovers(connection, query, self._wishes.older_than_s, one.id)
        if one not in found:
            raise StillNeeded(next(filter(None, map(self._reason, found)), "restored, or removed, meanwhile"))

    @cached_property
    def _runs(self) -> Runs:
        from orchestrator.tracking.runs import Runs  # imports MLflow: only what removes something waits for it

        return Runs(self._workspace.database.url, self._root)

    # Folders

    def _orphan_artifacts(self, of_runs: Sequence[tuple[Path, int | None]], of_sweeps: Sequence[Path]) -> Pile:
        """Of sweeps that a command works on nothing is among `of_runs`: what it makes has no row yet."""
        pile = Pile("artifacts of no run")
        if local_folder(self._root) is None:
            pile.keep(f"store {self._root} is not looked through", 0)
        for folder, sweep_id in of_runs:
            self._add_folder(pile, folder, remove=partial(self._remove_orphan, folder, sweep_id))
        for folder in of_sweeps:
            if self._has_root_alone:
                self._add_folder(pile, folder, remove=partial(self._remove_orphan, folder, None))
            else:
                pile.keep("may belong to another database", _size_of(folder))
        return pile

    def _remove_orphan(self, folder: Path, sweep_id: int | None) -> None:
        with self._undriven(sweep_id) as connection:
            if not leftovers.unknown(connection, [_name_of(folder)]):
                raise StillNeeded("of a run that has come up meanwhile")
            shutil.rmtree(folder)

    @property
    def _has_root_alone(self) -> bool:
        """Below `.orch` an embedded database has its artifacts alone; elsewhere several databases may share a root."""
        return self._workspace.is_embedded and self._workspace.settings.artifact_root is None

    def _states(self, found: Iterable[States]) -> Pile:
        pile = Pile("checkpoints of trials that are over")
        for one in found:
            folder = checkpoint_folder(one.artifact_uri)
            if folder is not None and folder.is_dir():
                remove = partial(self._remove_states, one, folder)
                self._add_folder(pile, folder, partial(self._why_wanted, one), remove)
        return pile

    def _why_wanted(self, one: States) -> str:
        reason = "of failed trials, which go on from them" if one.state is TrialState.FAILED else ""
        reason = reason or ("kept on request (keep_checkpoints: true)" if one.is_kept else "")
        return f"{reason}; removed only with --checkpoints" if reason and not self._wishes.checkpoints else ""

    def _remove_states(self, one: States, folder: Path) -> None:
        """The trial may have gone on from them since, and failed."""
        with self._undriven(one.sweep_id) as connection:
            if one not in leftovers.states(connection, one.trial_id):
                raise StillNeeded("of trials that went on meanwhile")
            if reason := self._why_young(folder):
                raise StillNeeded(reason)
            shutil.rmtree(folder)

    def _journals(self) -> Pile:
        pile = Pile("journals")
        for ours in self._workspace.journals:
            for folder in _folders(ours, JOURNAL):
                self._add_journal(pile, folder, is_ours=True)
        for foreign in self._foreign_journals():
            for folder in _folders(foreign, JOURNAL):
                self._add_journal(pile, folder, is_ours=False)
            if _is_long_empty(foreign):
                pile.add(0, foreign.rmdir, partial(_why_filled, foreign))
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
        elif self._wishes.foreign_journals:
            pile.add(waiting, partial(_remove_waiting, folder))
        else:
            pile.keep("with points for another database; --foreign-journals", waiting)

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
                self._add_folder(pile, session, partial(_why_new, session))
        if not self._is_young(folder) and _is_long_empty(folder):
            pile.add(0, folder.rmdir, partial(_why_filled, folder))

    def _logs(self) -> Pile:
        pile = Pile("old logs")
        folder = self._workspace.home.path / "logs"
        for path in sorted(folder.glob("*.log*")) if folder.is_dir() else ():
            if path.name not in LIVE_LOGS:
                self._add_file(pile, path, partial(_why_written, path))
        return pile

    def _add_folder(
        self, pile: Pile, folder: Path, why_kept: Why = _needless, remove: Callable[[], None] | None = None
    ) -> None:
        remove = remove or partial(shutil.rmtree, folder)
        pile.add(_size_of(folder), remove, lambda: why_kept() or self._why_young(folder))

    def _add_file(self, pile: Pile, path: Path, why_kept: Why = _needless) -> None:
        pile.add(_size_of_file(path), path.unlink, lambda: why_kept() or self._why_young(path))

    def _why_young(self, path: Path) -> str:
        """Empty also for what is gone: somebody else has removed it."""
        return self._too_young if path.exists() and self._is_young(path) else ""

    def _is_young(self, path: Path) -> bool:
        """Whether anything in it was written more recently than asked."""
        return _age_s(path) < self._wishes.older_than_s


def _in_a_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _why_written(log: Path) -> str:
    return "" if is_free(log) else "of what runs in the background"


def _why_new(folder: Path) -> str:
    return "of the last hour: may be just being made" if _age_s(folder) < BEING_MADE_S else ""


def _is_long_empty(folder: Path) -> bool:
    return _age_s(folder) >= BEING_MADE_S and not any(folder.iterdir())


def _why_filled(folder: Path) -> str:
    return "" if _is_long_empty(folder) else "in use again"


def _remove_drained(folder: Path) -> None:
    with _adopted(folder):  # its own end removes it
        pass
    if folder.exists():
        raise StillNeeded("with points that came up meanwhile")


def _remove_waiting(folder: Path) -> None:
    with _adopted(folder):
        shutil.rmtree(folder)


@contextlib.contextmanager
def _adopted(folder: Path) -> Iterator[None]:
    """Nobody can write into the journal, or out of it, until the block ends. Raises StillNeeded where somebody does."""
    journal = Journal.adopt(folder)
    if journal is None:
        folder.stat()  # raises FileNotFoundError: another recorder was faster and has drained it
        raise StillNeeded("of a recorder that has come up meanwhile")
    try:
        yield
    finally:
        journal.close()


def _run_folders(locations: Iterable[Location]) -> Iterator[tuple[Path, int | None]]:
    """(folder, the sweep's id) of every run below the experiments' local folders."""
    for location in locations:
        for path in _folders(local_folder(location.uri), RUN_FOLDER):
            yield path, location.sweep_id


def _name_of(folder: Path) -> str:
    """A run's id, or its beginning; an experiment folder's own name."""
    return folder.name.removesuffix("-checkpoints")


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
