"""One recorder a node: every worker of the node hands its words here, so connections do not grow with trials."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.execution.ray_tune.cluster import NAMESPACE
from orchestrator.tracking.recorder import Note, Points, Recorder, Remainder, connect_by_url

ANSWER_TIMEOUT_S = 120.0


class RecorderActor:
    """A `Recorder` behind Ray's calls. Answers every report with whether the sweep is being stopped."""

    def __init__(self, database_url: str, journal_folder: str) -> None:
        self._recorder = Recorder(functools.partial(connect_by_url, database_url), Path(journal_folder))
        self._stopping = False

    def take(self, points: list[Points], notes: list[Note]) -> bool:
        if points:
            self._recorder.record(points)
        if notes:
            self._recorder.notes(notes)
        return self._stopping

    def drain(self, timeout_s: float) -> bool:
        return self._recorder.drain(timeout_s)

    def sync(self, timeout_s: float) -> bool:
        self._recorder.sync(timeout_s)
        return self._stopping

    def stop_trials(self) -> None:
        self._stopping = True

    def pending(self) -> int:
        return self._recorder.pending()

    def close(self, timeout_s: float) -> Remainder:
        return self._recorder.close(timeout_s)


class Recorders:
    """The recorders of a cluster, one a node, named so that workers find the one of their node."""

    def __init__(self, prefix: str, database_url: str, journal_folder: str) -> None:
        self.prefix = prefix
        self._database_url = database_url
        self._journal_folder = journal_folder
        self._actors: dict[str, ray.actor.ActorHandle] = {}

    def ensure(self, node_ids: Iterable[str]) -> None:
        """Starts a recorder on every node that has none yet, and waits until the new ones answer."""
        missing = [node_id for node_id in node_ids if node_id not in self._actors]
        self._actors.update((node_id, self._start(node_id)) for node_id in missing)
        ray.get([self._actors[node_id].pending.remote() for node_id in missing], timeout=ANSWER_TIMEOUT_S)

    def drain(self, timeout_s: float) -> None:
        """Waits until what dead recorders left on the nodes is in the database, but not for ever."""
        ray.get([actor.drain.remote(timeout_s) for actor in self._actors.values()])

    def stop_trials(self) -> None:
        for actor in self._actors.values():
            actor.stop_trials.remote()

    def close(self, timeout_s: float) -> list[Remainder]:
        """What could not be written in time; it stays in the journals."""
        answers = {node_id: actor.close.remote(timeout_s) for node_id, actor in self._actors.items()}
        return [_answer(node_id, answer, timeout_s + ANSWER_TIMEOUT_S) for node_id, answer in answers.items()]

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


def _answer(node_id: str, answer: ray.ObjectRef, timeout_s: float) -> Remainder:
    try:
        remainder: Remainder = ray.get(answer, timeout=timeout_s)
        return remainder
    except (ray.exceptions.RayError, TimeoutError) as error:  # the node or its recorder is gone; the others count
        first_line = str(error).strip().split("\n")[0]
        return Remainder(0, (), reason=f"the recorder of node {node_id[:8]} gave no answer: {first_line}")


def recorder_name(prefix: str, node_id: str) -> str:
    return f"{prefix}-{node_id}"
