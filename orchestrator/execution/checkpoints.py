"""Keeps a trial's saved states in a folder beside its artifacts. Knows nothing of what is in a state.

A file is whole or not there: it is written under another name, flushed and renamed. Its first line says which config
it belongs to and what follows, so a torn or foreign file is recognised and the one before it is used; and what the
verdict on the trial was by then, which its next attempt would not see. Its name says which attempt wrote it: a worker
that outlives its attempt changes nothing for the ones after. A member of a population leaves its states of milestones
where others find them, and may go on from another's: that it belongs to another config is then what is wanted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pydantic import BaseModel

from orchestrator.execution.job import Job, Sink
from orchestrator.execution.population import leave, state_path
from orchestrator.execution.verdict import Verdict
from orchestrator.tracking.artifacts import checkpoint_folder
from orchestrator.trial import Finding, Severity, config_hash
from orchestrator.workload import flatten

MAGIC = "orch-checkpoint-3"
HEADER = re.compile(rf"{MAGIC} (\w+) (\w+) (\d+) (\{{.*\}})\n")
"""Owner, digest of the state, its size in bytes; `Verdict.memory` as JSON."""
HEADER_LIMIT = 2**20  # bytes; every first line is shorter: it may name each field of a config
CHECK_NAME = "checkpoint"


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

    Looks at first lines and sizes only: a state may be large.
    """
    return next((place.step + 1 for place, path in newest_first(artifact_uri) if _is_usable(path, owner)), 0)


def forget(artifact_uri: str) -> None:
    """Removes all states of a run that needs them no more. What cannot be removed costs space on a disk, no more."""
    if (folder := checkpoint_folder(artifact_uri)) is not None:
        shutil.rmtree(folder, ignore_errors=True)


def newest_first(artifact_uri: str) -> list[tuple[Place, Path]]:
    """The files of a run's states, those of the last attempt first and in it the highest step."""
    folder = checkpoint_folder(artifact_uri)
    if folder is None or not folder.is_dir():
        return []
    return sorted(((place, path) for place, path in _files(folder) if not path.name.startswith(".")), reverse=True)


class RunCheckpoint:
    """The states of one attempt, see `orchestrator.workload.Checkpoint`. Keeps two; none where the store is remote."""

    def __init__(self, job: Job, owner: str, sink: Sink, verdict: Verdict) -> None:
        self._job, self._owner, self._sink, self._verdict = job, owner, sink, verdict
        self._folder = checkpoint_folder(job.artifact_uri)
        self._last: Path | None = None  # loaded or saved
        self._milestone: int | None = None  # whose state is to be kept for others
        self.is_behind = False  # that state was not saved yet
        self._is_pausing = False

    def load(self) -> bytes | None:
        for place, path in newest_first(self._job.artifact_uri):
            try:
                state, memory = _read(path, self._owner)
                self._refuse_later(place)
            except Unusable as error:
                message = f"the checkpoint of step {place.step} is not used: {error}"
                self._warn(message, "training goes on from the one before it, or else from the start")
            else:
                self._last = path
                self._verdict.recall(memory)
                return state
        return None

    def copy(self, number: int) -> bool:
        """Puts another trial's state of the step before this attempt in the place of ours; False while there is none.

        What the verdict on that trial was by then comes along.
        """
        assert self._folder is not None, "no population without a folder"
        step = self._job.first_step - 1
        try:
            state, memory = _read(state_path(Path(self._job.population), number, step), None)
        except Unusable:
            return False
        _write(self._path(step), self._owner, state, memory)
        return True

    def expect(self, step: int, pausing: bool) -> None:
        """The state after this step is wanted by others, and to go on from when `pausing`."""
        self._milestone, self._is_pausing, self.is_behind = step, pausing, True

    def _refuse_later(self, place: Place) -> None:
        """The ledger says where this attempt's points begin; a worker that could not be stopped may have gone on."""
        if place.attempt != self._job.attempt and place.step >= self._job.first_step:
            raise Unusable("it came after this attempt began")

    def due(self, step: int) -> bool:
        if self._folder is None or step <= 0:
            return False
        if step == self._milestone:
            return not self._is_pausing  # else it is saved by whoever looks at `context.stopping`
        return step % self._job.checkpoint_every == 0

    def save(self, step: int, state: bytes) -> None:
        if self._folder is None:
            return
        self._sink.sync()  # else the next attempt could go on behind reports that were lost
        path = self._path(step)
        try:
            _write(path, self._owner, state, self._verdict.memory())
            if self._job.population and step == self._milestone:
                leave(Path(self._job.population), self._job.number, step, path)
            if path != self._last:
                _remove_others({path, self._last or path}, self._job.attempt)
        except OSError as error:
            message = f"checkpoints cannot be kept in {self._folder}: {error.strerror or error}"
            self._warn(message, "training goes on; interrupted now, it starts again at the last one that was kept")
        else:
            self._last, self.is_behind = path, self.is_behind and step != self._milestone

    def _path(self, step: int) -> Path:
        assert self._folder is not None
        return self._folder / f"step-{step}.attempt-{self._job.attempt}"

    def _warn(self, message: str, advice: str) -> None:
        self._sink.finding(self._job, Finding(CHECK_NAME, Severity.WARNING, message, advice))


def _files(folder: Path) -> Iterator[tuple[Place, Path]]:
    """States and, with a dot before their names, drafts."""
    for path in folder.iterdir():
        if found := re.fullmatch(r"\.?step-(\d+)\.attempt-(\d+)", path.name):
            yield Place(attempt=int(found[2]), step=int(found[1])), path


def _write(path: Path, owner: str, state: bytes, memory: dict[str, Any]) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}")
    try:
        with draft.open("wb") as file:
            file.write(f"{MAGIC} {owner} {_digest(state)} {len(state)} {json.dumps(memory)}\n".encode())
            file.write(state)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name too must outlive a power cut
    finally:
        os.close(folder)


def _remove_others(kept: set[Path], attempt: int) -> None:
    """Removes what this attempt and those before it have no more use for; what later ones wrote is theirs."""
    for place, path in list(_files(next(iter(kept)).parent)):
        if place.attempt <= attempt and path not in kept:
            path.unlink(missing_ok=True)


def _read(path: Path, owner: str | None) -> tuple[bytes, dict[str, Any]]:
    """The state in a file, and what the verdict remembered by then; None is any owner. Raises Unusable."""
    with _opened(path, owner) as (file, digest, memory):
        state = file.read()
    if _digest(state) != digest:
        raise Unusable("its content is not what was written")
    return state, memory


def _is_usable(path: Path, owner: str) -> bool:
    try:
        with _opened(path, owner):
            return True
    except Unusable:
        return False


@contextlib.contextmanager
def _opened(path: Path, owner: str | None) -> Iterator[tuple[BinaryIO, str, dict[str, Any]]]:
    """The file, read up to its state, the digest that the state must have, and the memory. Raises Unusable."""
    try:
        with path.open("rb") as file:
            header = HEADER.fullmatch(file.readline(HEADER_LIMIT).decode(errors="replace"))
            if header is None:
                raise Unusable("it is no checkpoint of this version of orch")
            its_owner, digest, size_bytes, memory = header.groups()
            if owner not in (None, its_owner):
                raise Unusable("it belongs to another workload or config")
            if int(size_bytes) != os.fstat(file.fileno()).st_size - file.tell():
                raise Unusable("it was not written to its end")
            yield file, digest, _memory_of(memory)
    except OSError as error:
        raise Unusable(f"it cannot be read ({error.strerror or error})") from error


def _memory_of(text: str) -> dict[str, Any]:
    try:
        memory: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise Unusable("its first line is not what was written") from error
    return memory


def _digest(state: bytes) -> str:
    return hashlib.sha256(state).hexdigest()
