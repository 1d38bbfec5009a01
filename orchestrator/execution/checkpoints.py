"""Keeps a trial's saved states in a folder beside its artifacts. Knows nothing of what is in a state.

A file is whole or not there: it is written under another name, flushed and renamed. Its first line says which config
it belongs to and what follows, so a torn or foreign file is recognised and the one before it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pydantic import BaseModel

from orchestrator.execution.job import Job, Sink
from orchestrator.tracking.artifacts import checkpoint_folder
from orchestrator.trial import Finding, Severity, config_hash
from orchestrator.workload import flatten

MAGIC = "orch-checkpoint-1"
HEADER_LIMIT = 256  # bytes; every first line is shorter
CHECK_NAME = "checkpoint"


class Unusable(Exception):
    """A file from which this trial cannot go on; says why."""


def owner_of(workload: str, config: BaseModel) -> str:
    """Names the only kind of trial that may go on from a state: same workload, same config, defaults included."""
    return config_hash({"workload": workload, "config": flatten(config)})


def first_step_of(artifact_uri: str, owner: str) -> int:
    """Where the run's next attempt begins: the step after its newest usable state; 0 without one.

    Looks at first lines and sizes only: a state may be large.
    """
    return next((step_of(path) + 1 for path in newest_first(artifact_uri) if _is_usable(path, owner)), 0)


def forget(artifact_uri: str) -> None:
    """Removes all states of a run that needs them no more. What cannot be removed costs space on a disk, no more."""
    if (folder := checkpoint_folder(artifact_uri)) is not None:
        shutil.rmtree(folder, ignore_errors=True)


def newest_first(artifact_uri: str) -> list[Path]:
    """The files of a run's states, the highest step first."""
    folder = checkpoint_folder(artifact_uri)
    if folder is None or not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if re.fullmatch(r"step-\d+", path.name)), key=step_of)[::-1]


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


class RunCheckpoint:
    """The states of one attempt, see `orchestrator.workload.Checkpoint`. Keeps two; none where the store is remote."""

    def __init__(self, job: Job, owner: str, sink: Sink) -> None:
        self._job, self._owner, self._sink = job, owner, sink
        self._folder = checkpoint_folder(job.artifact_uri)
        self._last: Path | None = None  # loaded or saved

    def load(self) -> bytes | None:
        for path in newest_first(self._job.artifact_uri):
            try:
                state = _read(path, self._owner)
                if step_of(path) >= self._job.first_step:  # the ledger says where this attempt's points begin
                    raise Unusable("it came after this attempt began")
            except Unusable as error:
                message = f"the checkpoint of step {step_of(path)} is not used: {error}"
                self._warn(message, "training goes on from the one before it, or else from the start")
            else:
                self._last = path
                return state
        return None

    def due(self, step: int) -> bool:
        return self._folder is not None and step > 0 and step % self._job.checkpoint_every == 0

    def save(self, step: int, state: bytes) -> None:
        if self._folder is None:
            return
        self._sink.sync()  # else the next attempt could go on behind reports that were lost
        path = self._folder / f"step-{step}"
        try:
            _write(path, self._owner, state)
            if path != self._last:
                _remove_all_but({path, self._last or path})
        except OSError as error:
            message = f"checkpoints cannot be kept in {self._folder}: {error.strerror or error}"
            self._warn(message, "training goes on; interrupted now, it starts again at the last one that was kept")
        else:
            self._last = path

    def _warn(self, message: str, advice: str) -> None:
        self._sink.finding(self._job, Finding(CHECK_NAME, Severity.WARNING, message, advice))


def _write(path: Path, owner: str, state: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(f"{MAGIC} {owner} {_digest(state)} {len(state)}\n".encode())
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


def _remove_all_but(kept: set[Path]) -> None:
    for other in next(iter(kept)).parent.iterdir():
        if other not in kept:
            other.unlink(missing_ok=True)


def _read(path: Path, owner: str) -> bytes:
    """The state in a file. Raises Unusable."""
    with _opened(path, owner) as (file, digest):
        state = file.read()
    if _digest(state) != digest:
        raise Unusable("its content is not what was written")
    return state


def _is_usable(path: Path, owner: str) -> bool:
    try:
        with _opened(path, owner):
            return True
    except Unusable:
        return False


@contextlib.contextmanager
def _opened(path: Path, owner: str) -> Iterator[tuple[BinaryIO, str]]:
    """The file, read up to its state, and the digest that the state must have. Raises Unusable."""
    try:
        with path.open("rb") as file:
            words = file.readline(HEADER_LIMIT).decode(errors="replace").split()
            if len(words) != 4 or words[0] != MAGIC:
                raise Unusable("it is no checkpoint of this version of orch")
            if words[1] != owner:
                raise Unusable("it belongs to another workload or config")
            if words[3] != str(os.fstat(file.fileno()).st_size - file.tell()):
                raise Unusable("it was not written to its end")
            yield file, words[2]
    except OSError as error:
        raise Unusable(f"it cannot be read ({error.strerror or error})") from error


def _digest(state: bytes) -> str:
    return hashlib.sha256(state).hexdigest()
