"""One recorder a node: every worker of the node hands its words here, so connections do not grow with trials."""

from __future__ import annotations

import contextlib
import functools
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.execution.ray_tune.cluster import NAMESPACE
from orchestrator.execution.ray_tune.memory_kills import num_memory_kills
from orchestrator.execution.words import Receipt
from orchestrator.tracking.recorder import (
    JournalUnwritable,
    Note,
    Points,
    Recorder,
    Remainder,
    connect_by_url,
    secrets_of,
)

ANSWER_TIMEOUT_S = 120.0
SYNC_S = 1.0  # so long at a time a recorder waits for its disk
RESTART_TIMEOUT_S = 30.0  # a node that is gone restarts nothing
RESTART_POLL_S = 0.5
MEMORY_KILL_TIMEOUT_S = 5.0


class RecorderActor:
    """A `Recorder` behind Ray's calls. Answers every report with a receipt."""

    def __init__(self, database_url: str, journal_folder: str) -> None:
        connect = functools.partial(connect_by_url, database_url)
        self._recorder = Recorder(connect, Path(journal_folder), secrets=secrets_of(database_url))
        self._life = uuid.uuid4().hex
        self._stopping = False
        self._num_memory_kills = num_memory_kills()

    def take(self, points: list[Points], notes: list[Note]) -> Receipt:
        if points:
            self._recorder.record(points)
        if notes:
            self._recorder.notes(notes)
        return self._receipt()

    def drain(self, timeout_s: float) -> bool:
        return self._recorder.drain(timeout_s)

    def sync(self, timeout_s: float) -> Receipt:
        """Waits for the disk, but not so long that nobody else is heard meanwhile; the receipt says how far it is."""
        with contextlib.suppress(TimeoutError):
            self._recorder.sync(timeout_s)
        return self._receipt()

    def _receipt(self) -> Receipt:
        return Receipt(self._life, *self._recorder.given_and_safe(), self._stopping)

    def stop_trials(self) -> None:
        self._stopping = True

    def pending(self) -> int:
        return self._recorder.pending()

    def errors(self) -> tuple[str, str]:
        """Of the database and of the journal's disk, see `Recorder`."""
        return self._recorder.database_error, self._recorder.disk_error

    def memory_kill(self) -> bool:
        """True if the kernel killed a process here for want of memory since this was asked last."""
        before, self._num_memory_kills = self._num_memory_kills, num_memory_kills()
        return self._num_memory_kills > before

    def close(self, timeout_s: float) -> Remainder:
        try:
            return self._recorder.close(timeout_s)
        except JournalUnwritable as error:  # what memory held is lost; its trials have failed
            return Remainder(self._recorder.pending(), (), reason=str(error).split("\n")[0])


class Recorders:
    """The recorders of a cluster, one a node, named so that workers find the one of their node."""

    def __init__(self, prefix: str, database_url: str, journal_folder: str) -> None:
        self.prefix = prefix
        self._database_url = database_url
        self._journal_folder = journal_folder
        self._actors: dict[str, ray.actor.ActorHandle] = {}
        self._asked: dict[str, ray.ObjectRef] = {}  # by node: answers of `errors` that are to come
        self._errors: dict[str, tuple[str, str]] = {}

    def ensure(self, node_ids: Iterable[str]) -> None:
        """Starts a recorder on every node that has none yet, and waits until the new ones answer."""
        missing = [node_id for node_id in node_ids if node_id not in self._actors]
        self._actors.update((node_id, self._start(node_id)) for node_id in missing)
        for node_id in missing:
            _answer_of(self._actors[node_id].pending.remote, timeout_s=ANSWER_TIMEOUT_S)

    def drain(self, timeout_s: float) -> None:
        """Waits until what dead recorders left on the nodes is in the database, but not for ever."""
        for actor in self._actors.values():
            _answer_of(actor.drain.remote, timeout_s, timeout_s=timeout_s + ANSWER_TIMEOUT_S)

    def stop_trials(self) -> None:
        for actor in self._actors.values():
            actor.stop_trials.remote()

    def errors(self) -> tuple[str, str]:
        """Why a recorder does not reach the database, and why one cannot write its journal; empty when all can.

        As of their last answers: waits for nobody.
        """
        for node_id, actor in self._actors.items():
            asked = self._asked.get(node_id)
            if asked is None or ray.wait([asked], timeout=0)[0]:
                if asked is not None:
                    self._errors[node_id] = _said(asked)
                self._asked[node_id] = actor.errors.remote()
        of_databases, of_disks = zip(*self._errors.values(), strict=True) if self._errors else ((), ())
        return next(filter(None, of_databases), ""), next(filter(None, of_disks), "")

    def memory_kill(self, node_id: str) -> bool:
        """Whether a process that has just died on that node was killed for want of memory, as far as anybody knows."""
        try:
            return bool(ray.get(self._actors[node_id].memory_kill.remote(), timeout=MEMORY_KILL_TIMEOUT_S))
        except (KeyError, ray.exceptions.RayError, TimeoutError):  # the whole node is gone
            return False

    def close(self, timeout_s: float) -> list[Remainder]:
        """What could not be written in time; it stays in the journals."""
        for actor in self._actors.values():  # all at once; a second call gives the same answer
            actor.close.remote(timeout_s)
        return [_closed(node_id, actor, timeout_s) for node_id, actor in self._actors.items()]

    def _start(self, node_id: str) -> ray.actor.ActorHandle:
        return (
            ray.remote(RecorderActor)
            .options(
                name=recorder_name(self.prefix, node_id),
                namespace=NAMESPACE,
                num_cpus=0,
                max_restarts=-1,  # its journal is on disk: the next life drains what this one left
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            .remote(self._database_url, self._journal_folder)
        )


def _closed(node_id: str, actor: ray.actor.ActorHandle, closing_s: float) -> Remainder:
    try:
        remainder: Remainder = _answer_of(actor.close.remote, closing_s, timeout_s=closing_s + ANSWER_TIMEOUT_S)
        return remainder
    except (ray.exceptions.RayError, TimeoutError) as error:  # the node or its recorder is gone; the others count
        first_line = str(error).strip().split("\n")[0]
        reason = (
            f"the recorder of node {node_id[:8]} gave no answer ({first_line.rstrip('.')}); what it had not written "
            "lies in the journal there, and the next recorder there writes it"
        )
        return Remainder(0, (), reason=reason)


def _answer_of(ask: Callable[..., ray.ObjectRef], *arguments: object, timeout_s: float) -> Any:
    """Asks a recorder, and again if it dies meanwhile: Ray starts it anew. Raises RayActorError if it stays away."""
    deadline = time.monotonic() + RESTART_TIMEOUT_S
    while True:
        try:
            return ray.get(ask(*arguments), timeout=timeout_s)
        except ray.exceptions.RayActorError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RESTART_POLL_S)


def _said(asked: ray.ObjectRef) -> tuple[str, str]:
    try:
        errors: tuple[str, str] = ray.get(asked)
        return errors
    except ray.exceptions.RayError:  # it is being started again, or its node is gone: it says nothing
        return "", ""


def recorder_name(prefix: str, node_id: str) -> str:
    return f"{prefix}-{node_id}"
