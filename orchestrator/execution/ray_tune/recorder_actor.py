"""One recorder a node: every worker of the node hands its words here, so connections do not grow with trials."""

from __future__ import annotations

import contextlib
import functools
import socket
import time
import uuid
from collections.abc import Callable, Collection
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.execution.ray_tune.accounts import Account, Accounts, Attempt
from orchestrator.execution.ray_tune.cluster import NAMESPACE, alive_nodes
from orchestrator.execution.ray_tune.memory_kills import num_memory_kills
from orchestrator.execution.words import Receipt
from orchestrator.settings import Settings, remote_journal_folder
from orchestrator.tracking.journal import others_with_backlog
from orchestrator.tracking.recorder import (
    JournalUnwritable,
    Note,
    Points,
    Recorder,
    Remainder,
    Unwritten,
    connect_by_url,
    secrets_of,
)

ANSWER_TIMEOUT_S = 120.0
SYNC_S = 1.0  # so long at a time a recorder waits for its disk
RESTART_TIMEOUT_S = 30.0  # so long a recorder, or its node, may take to come back
RESTART_POLL_S = 0.5
MEMORY_KILL_TIMEOUT_S = 5.0
OTHERS_TIMEOUT_S = 1.0  # nothing else happens meanwhile
ASK_OTHERS_EVERY_S = 5.0
KIND = "recorder-"  # begins the name of every recorder on a cluster

Errors = tuple[str, str]  # why the database is not reached, and why the journal cannot be written; empty when they can


class RecorderActor:
    """A `Recorder` behind Ray's calls. Answers every report with a receipt."""

    def __init__(self, database_url: str, journal_folder: str) -> None:
        """`journal_folder`: a path, or the name of a folder in the place that this node has for journals."""
        connect = functools.partial(connect_by_url, database_url)
        folder = remote_journal_folder(Settings()) / journal_folder
        self._recorder = Recorder(connect, folder, secrets=secrets_of(database_url))
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

    def account(self) -> tuple[Account, Errors]:
        return self._account(), (self._recorder.database_error, self._recorder.disk_error)

    def _account(self) -> Account:
        recorder = self._recorder
        return Account(socket.gethostname(), str(recorder.journal), recorder.brought, recorder.is_clear)

    def memory_kill(self) -> bool:
        """True if the kernel killed a process here for want of memory since this was asked last."""
        before, self._num_memory_kills = self._num_memory_kills, num_memory_kills()
        return self._num_memory_kills > before

    def close(self, timeout_s: float) -> tuple[Unwritten, Account, list[str]]:
        """Also the names of other journals, in the same place, that still hold something."""
        try:
            unwritten = self._recorder.close(timeout_s)
        except JournalUnwritable as error:  # what memory held is lost; its trials have failed
            unwritten = Unwritten(self._recorder.pending(), (), reason=str(error).split("\n")[0])
        return unwritten, self._account(), others_with_backlog(self._recorder.journal)


class Recorders:
    """The recorders of a cluster, one a node, named so that workers find the one of their node."""

    def __init__(self, prefix: str, database_url: str, journal_folder: str) -> None:
        self.prefix = prefix
        self._database_url = database_url
        self._journal_folder = journal_folder
        self._actors: dict[str, ray.actor.ActorHandle] = {}
        self._asked: dict[str, tuple[ray.ObjectRef, Collection[Attempt]]] = {}  # by node: an `account` that is to come
        self._errors: dict[str, Errors] = {}  # by node, as of the last answer
        self._asked_others_at = -ASK_OTHERS_EVERY_S
        self.accounts = Accounts()

    def ensure(self, node_ids: Collection[str]) -> None:
        """Starts a recorder on every node that has none yet, and waits until the new ones answer."""
        missing = [node_id for node_id in node_ids if node_id not in self._actors]
        self._actors.update((node_id, self._start(node_id)) for node_id in missing)
        for node_id in missing:
            try:
                account, self._errors[node_id] = _answer_of(
                    self._actors[node_id].account.remote, timeout_s=ANSWER_TIMEOUT_S
                )
            except ray.exceptions.RayError:
                if any(node.node_id == node_id for node in alive_nodes()):
                    raise
            else:
                self.accounts.heard(node_id, account)

    def ask_others(self, node_ids: Collection[str]) -> None:
        """While the journal of a node that is gone is missed, asks other commands now and then who brought it over.

        `node_ids`: the nodes there are now.
        """
        is_missed = self.accounts.missing(self._actors.keys() - node_ids)
        if is_missed and time.monotonic() - self._asked_others_at >= ASK_OTHERS_EVERY_S:
            self._asked_others_at = time.monotonic()
            self.accounts.brought_by_others(_brought_by_others(self.prefix, node_ids))

    def drain(self, timeout_s: float) -> None:
        """Waits until what dead recorders left on the nodes is in the database, but not for ever."""
        for actor in self._actors.values():
            _answer_of(actor.drain.remote, timeout_s, timeout_s=timeout_s + ANSWER_TIMEOUT_S)

    def stop_trials(self) -> None:
        for actor in self._actors.values():
            actor.stop_trials.remote()

    def listen(self) -> None:
        """Takes the answers that have come, and asks again. Waits for nobody."""
        for node_id, actor in self._actors.items():
            if (asked := self._asked.get(node_id)) is None or ray.wait([asked[0]], timeout=0)[0]:
                if asked is not None:
                    self._take_answer(node_id, *asked)
                self._asked[node_id] = actor.account.remote(), self.accounts.unstored(node_id)

    def _take_answer(self, node_id: str, answer: ray.ObjectRef, unstored: Collection[Attempt]) -> None:
        try:
            account, self._errors[node_id] = ray.get(answer)
        except ray.exceptions.RayError:  # it is being started again, or its node is gone: it complains of nothing
            self._errors.pop(node_id, None)
        else:
            self.accounts.heard(node_id, account, unstored)

    @property
    def errors(self) -> Errors:
        """Of all recorders, the first to complain of each."""
        of_databases, of_disks = (one for one, _ in self._errors.values()), (one for _, one in self._errors.values())
        return next(filter(None, of_databases), ""), next(filter(None, of_disks), "")

    def memory_kill(self, node_id: str) -> bool:
        """Whether a process that has just died on that node was killed for want of memory, as far as anybody knows."""
        try:
            return bool(ray.get(self._actors[node_id].memory_kill.remote(), timeout=MEMORY_KILL_TIMEOUT_S))
        except (KeyError, ray.exceptions.RayError, TimeoutError):  # the whole node is gone
            return False

    def close(self, timeout_s: float, node_ids: Callable[[], Collection[str]]) -> list[Remainder]:
        """What could not be written in time, which stays in the journals, and what went away with a node.

        `node_ids`: the nodes there are now. One that is gone has half a minute to come back.
        """
        deadline = time.monotonic() + RESTART_TIMEOUT_S
        while True:
            self.ensure(there := set(node_ids()))
            self.ask_others(there)
            self._close(there - self.accounts.told.keys(), timeout_s)
            if not self.accounts.missing(self._actors) or time.monotonic() > deadline:
                return self.accounts.remainders(self._actors)
            time.sleep(RESTART_POLL_S)

    def _close(self, node_ids: Collection[str], timeout_s: float) -> None:
        asked = {node_id: self._actors[node_id].close for node_id in node_ids}
        for close in asked.values():  # all at once; a second call gives the same answer
            close.remote(timeout_s)
        for node_id, close in asked.items():
            try:
                unwritten, account, left = _answer_of(close.remote, timeout_s, timeout_s=timeout_s + ANSWER_TIMEOUT_S)
            except ray.exceptions.RayTaskError as error:
                reason = f"the recorder of node {node_id[:8]} failed: {error.cause}"
                self.accounts.closed(node_id, Unwritten(0, (), reason=reason))
            except (ray.exceptions.RayError, TimeoutError):  # the node or its recorder is gone
                continue
            else:
                self.accounts.heard(node_id, account)
                self.accounts.closed(node_id, unwritten, left)

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


def _brought_by_others(prefix: str, node_ids: Collection[str]) -> set[str]:
    """The journals that other commands' recorders on these nodes have brought over: any may have been the first there.

    What does not answer soon, has just ended, or is of another version, is asked again at the next look.
    """
    asked = []
    for name in ray.util.list_named_actors():
        if name.startswith(KIND) and not name.startswith(prefix) and name.rpartition("-")[2] in node_ids:
            with contextlib.suppress(ValueError, AttributeError):
                asked.append(ray.get_actor(name, namespace=NAMESPACE).account.remote())
    brought: set[str] = set()
    for answer in ray.wait(asked, num_returns=len(asked), timeout=OTHERS_TIMEOUT_S)[0] if asked else ():
        with contextlib.suppress(ray.exceptions.RayError):
            account, _ = ray.get(answer)
            brought.update(account.brought)
    return brought


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


def recorder_name(prefix: str, node_id: str) -> str:
    return f"{prefix}-{node_id}"
