"""Keeps a trial's saved states on a shelf beside its artifacts. Knows nothing of what is in a state.

A file is whole or not there, see `orchestrator.tracking.shelf`. Its first line says which config it belongs to and what
follows, so a torn or foreign file is recognised and the one before it is used; and what the verdict on the trial was
by then, which its next attempt would not see. Its name says which attempt wrote it: a worker
that outlives its attempt changes nothing for the ones after. A member of a population leaves its states of milestones
where others find them, and may go on from another's: that it belongs to another config is then what is wanted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pydantic import BaseModel

from orchestrator.execution.job import Job, Sink
from orchestrator.execution.population import leave, state_path
from orchestrator.execution.verdict import Verdict
from orchestrator.tracking.shelf import LocalShelf, Shelf, shelf_of
from orchestrator.trial import Finding, Severity, config_hash
from orchestrator.workload import flatten

MAGIC = "orch-checkpoint-4"
HEADER = re.compile(rf"{MAGIC} (\w+) ((\w+) (\w+) (\d+) (\{{.*\}}))\n")
"""Digest of what follows in the line: owner, digest of the state, its size in bytes; `Verdict.memory` as JSON."""
HEADER_LIMIT = 2**20  # bytes; every first line is shorter: it may name each field of a config
CHECK_NAME = "checkpoint"
NUM_COMMIT_DIGITS = 10
ASK_AGAIN_AFTER_S = (0.5, 2.0, 5.0)  # where a bucket or a file server has just not listed its files


class Unusable(Exception):
    """A file from which this trial cannot go on; says why."""


class Place(NamedTuple):
    """What a file's name says. Of two states that of the later attempt counts, whatever its step."""

    attempt: int
    step: int


def owner_of(workload: str, config: BaseModel) -> str:
    """Names the only kind of trial that may go on from a state: same workload, same config, defaults included."""
    return config_hash({"workload": workload, "config": flatten(config)})


def first_step_of(artifact_uri: str, owner: str) -> int:
    """Where the run's next attempt begins: the step after its newest usable state; 0 without one.

    Looks at first lines and sizes only: a state may be large. Raises Unusable when it cannot be known which there are.
    """
    shelf = shelf_of(artifact_uri)
    return next((place.step + 1 for place, name in newest_first(shelf) if shelf and _is_usable(shelf, name, owner)), 0)


def forget(artifact_uri: str) -> None:
    """Removes all states of a run that needs them no more. What cannot be removed costs space, no more."""
    if (shelf := shelf_of(artifact_uri)) is not None:
        shelf.clear()


def keep_two(artifact_uri: str, mode: str) -> None:
    """Of the states of a trial that has its result, leaves the last one and the best one. Raises OSError."""
    if (shelf := shelf_of(artifact_uri)) is None or not (found := _states(shelf)):
        return
    best = _best_of(shelf, found, mode)
    _remove_others(shelf, {found[0][1], best[1] if best else found[0][1]}, found[0][0].attempt)


def better_of(best: tuple[float, str] | None, other: tuple[float | None, str], mode: str) -> tuple[float, str] | None:
    """Of two states with their objectives the better one, the first if they are equal; a non-finite one is none."""
    objective, name = other
    if objective is None or not math.isfinite(objective):
        return best
    sign = 1 if mode == "min" else -1
    return (objective, name) if best is None or sign * objective < sign * best[0] else best


def newest_first(shelf: Shelf | None) -> list[tuple[Place, str]]:
    """The files of a run's states, those of the last attempt first and in it the highest step.

    A store that fails is asked again, some seconds long. Raises Unusable when it still does.
    """
    if shelf is None:
        return []
    for pause_s in ASK_AGAIN_AFTER_S:
        with contextlib.suppress(OSError):
            return _states(shelf)
        time.sleep(pause_s)
    try:
        return _states(shelf)
    except OSError as error:
        raise Unusable(f"the states in {shelf} cannot be listed ({error.strerror or error})") from error


def _states(shelf: Shelf) -> list[tuple[Place, str]]:
    return sorted(((place, name) for place, name in _files(shelf) if not name.startswith(".")), reverse=True)


class RunCheckpoint:
    """The states of one attempt, see `orchestrator.workload.Checkpoint`. Keeps two and the best, if there is a shelf.

    A state's objective is the one reported last before it was saved.
    """

    def __init__(
        self, job: Job, owner: str, sink: Sink, verdict: Verdict, code_digest: Callable[[], str] = lambda: ""
    ) -> None:
        self._job, self._owner, self._sink, self._verdict = job, owner, sink, verdict
        self._code_digest = code_digest
        self._shelf = shelf_of(job.artifact_uri)
        self.is_kept = job.keep_checkpoints and self._shelf is not None
        self._last: str | None = None  # loaded or saved
        self._best: tuple[float, str] | None = None  # objective and file
        self._milestone: int | None = None  # whose state is to be kept for others
        self.is_behind = False  # that state was not saved yet
        self._is_pausing = False

    def load(self) -> bytes | None:
        try:
            found = newest_first(self._shelf)
        except Unusable as error:
            self._warn(str(error), "training goes on from the start")
            return None
        for place, name in found:
            assert self._shelf is not None, "there are files on it"
            try:
                state, memory = _read(self._shelf, name, self._owner)
                self._refuse_later(place)
            except Unusable as error:
                message = f"the checkpoint of step {place.step} is not used: {error}"
                self._warn(message, "training goes on from the one before it, or else from the start")
            else:
                self._last, self._best = name, self._best_until(place.step, found)
                self._verdict.recall(memory)
                self._note_other_code(place, memory)
                return state
        return None

    def copy(self, number: int) -> bool:
        """Puts another trial's state of the step before this attempt in the place of ours; False while there is none.

        What the verdict on that trial was by then comes along.
        """
        assert self._shelf is not None, "no population without a folder"
        step = self._job.first_step - 1
        path = state_path(Path(self._job.population), number, step)
        try:
            state, memory = _read(LocalShelf(path.parent), path.name, None)
        except Unusable:
            return False
        _write(self._shelf, self._name(step), self._owner, state, memory)
        return True

    def expect(self, step: int, pausing: bool) -> None:
        """The state after this step is wanted by others, and to go on from when `pausing`."""
        self._milestone, self._is_pausing, self.is_behind = step, pausing, True

    def _best_until(self, step: int, found: Iterable[tuple[Place, str]]) -> tuple[float, str] | None:
        """The best state of the steps that this attempt does not train again."""
        assert self._shelf is not None
        return _best_of(self._shelf, [(place, name) for place, name in found if place.step <= step], self._job.mode)

    def _note_other_code(self, place: Place, memory: Mapping[str, Any]) -> None:
        """A state goes on under changed code if it fits at all; whoever reads the curve should know where."""
        before, now = memory.get("code", ""), self._code_digest()
        if before in ("", now):
            return
        commits = [memory.get("git_commit", "")[:NUM_COMMIT_DIGITS], self._job.git_commit[:NUM_COMMIT_DIGITS]]
        versions = commits if all(commits) and commits[0] != commits[1] else [f"sources {before}", f"sources {now}"]
        message = f"the workload's code changed after the state of step {place.step} was saved"
        advice = "training went on from that state; to train all steps with one code, run the sweep under another name"
        self._warn(f"{message}: {versions[0]}, now {versions[1]}", advice)

    def _refuse_later(self, place: Place) -> None:
        """The ledger says where this attempt's points begin; a worker that could not be stopped may have gone on."""
        if place.attempt != self._job.attempt and place.step >= self._job.first_step:
            raise Unusable("it came after this attempt began")

    def due(self, step: int) -> bool:
        if self._shelf is None or step <= 0:
            return False
        if step == self._milestone:
            return not self._is_pausing  # else it is saved by whoever looks at `context.stopping`
        return step % self._job.checkpoint_every == 0

    def save(self, step: int, state: bytes) -> None:
        if self._shelf is None:
            return
        self._sink.sync()  # else the next attempt could go on behind reports that were lost
        name = self._name(step)
        try:
            _write(self._shelf, name, self._owner, state, self._memory())
            self._best = better_of(self._best, (self._verdict.objective, name), self._job.mode)
            if isinstance(self._shelf, LocalShelf) and self._job.population and step == self._milestone:
                leave(Path(self._job.population), self._job.number, step, self._shelf.folder / name)
            if name != self._last:
                kept = {name, self._last or name, self._best[1] if self._best else name}
                _remove_others(self._shelf, kept, self._job.attempt)
        except OSError as error:
            message = f"checkpoints cannot be kept in {self._shelf}: {error.strerror or error}"
            self._warn(message, "training goes on; interrupted now, it starts again at the last one that was kept")
        else:
            self._last, self.is_behind = name, self.is_behind and step != self._milestone

    def _memory(self) -> dict[str, Any]:
        """What a first line says besides: what the verdict knew, and under which code."""
        return {**self._verdict.memory(), "code": self._code_digest(), "git_commit": self._job.git_commit}

    def _name(self, step: int) -> str:
        return f"step-{step}.attempt-{self._job.attempt}"

    def _warn(self, message: str, advice: str) -> None:
        self._sink.finding(self._job, Finding(CHECK_NAME, Severity.WARNING, message, advice))


def _files(shelf: Shelf) -> Iterator[tuple[Place, str]]:
    """States and, with a dot before their names, drafts."""
    for name in shelf.names():
        if found := re.fullmatch(r"\.?step-(\d+)\.attempt-(\d+)", name):
            yield Place(attempt=int(found[2]), step=int(found[1])), name


def _write(shelf: Shelf, name: str, owner: str, state: bytes, memory: dict[str, Any]) -> None:
    told = f"{owner} {_digest(state)} {len(state)} {json.dumps(memory)}"
    shelf.write(name, [f"{MAGIC} {_digest(told.encode())} {told}\n".encode(), state])


def _remove_others(shelf: Shelf, kept: set[str], attempt: int) -> None:
    """Removes what this attempt and those before it have no more use for; what later ones wrote is theirs."""
    for place, name in list(_files(shelf)):
        if place.attempt <= attempt and name not in kept:
            shelf.remove(name)


def _read(shelf: Shelf, name: str, owner: str | None) -> tuple[bytes, dict[str, Any]]:
    """The state in a file, and what the verdict remembered by then; None is any owner. Raises Unusable."""
    with _opened(shelf, name, owner) as (file, digest, memory):
        state = file.read()
    if _digest(state) != digest:
        raise Unusable("its content is not what was written")
    return state, memory


def _best_of(shelf: Shelf, files: Iterable[tuple[Place, str]], mode: str) -> tuple[float, str] | None:
    """The best state and its objective by what first lines say; of equal ones the earliest."""
    best = None
    for _, name in sorted(files):
        with contextlib.suppress(Unusable), _opened(shelf, name, None) as (_file, _digest, memory):
            best = better_of(best, (memory["reported"][1], name), mode)
    return best


def _is_usable(shelf: Shelf, name: str, owner: str) -> bool:
    try:
        with _opened(shelf, name, owner):
            return True
    except Unusable:
        return False


@contextlib.contextmanager
def _opened(shelf: Shelf, name: str, owner: str | None) -> Iterator[tuple[BinaryIO, str, dict[str, Any]]]:
    """The file, read up to its state, the digest that the state must have, and the memory. Raises Unusable."""
    try:
        with shelf.opened(name) as (file, size_bytes):
            header = HEADER.fullmatch(file.readline(HEADER_LIMIT).decode(errors="replace"))
            if header is None:
                raise Unusable("it is no checkpoint of this version of orch")
            line_digest, told, its_owner, digest, state_bytes, memory = header.groups()
            if _digest(told.encode()) != line_digest:
                raise Unusable("its first line is not what was written")
            if owner not in (None, its_owner):
                raise Unusable("it belongs to another workload or config")
            if int(state_bytes) != size_bytes - file.tell():
                raise Unusable("it was not written to its end")
            yield file, digest, json.loads(memory)
    except OSError as error:
        raise Unusable(f"it cannot be read ({error.strerror or error})") from error


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
