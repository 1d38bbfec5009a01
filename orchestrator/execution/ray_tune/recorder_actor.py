"""One recorder a node: every worker of the node hands its words here, so connections do not grow with trials."""

from __future__ import annotations

import functools
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.execution.ray_tune.cluster import NAMESPACE
from orchestrator.settings import Settings, remote_journal_folder
from orchestrator.tracking.recorder import FindingRow, Points, Recorder, Remainder, connect_by_url

ANSWER_TIMEOUT_S = 120.0


class RecorderActor:
    """A `Recorder` behind Ray's calls. Answers every report with whether the sweep is being stopped."""

    def __init__(self, database_url: str, journal_folder: str) -> None:
        folder = Path(journal_folder) if journal_folder else remote_journal_folder(Settings())
        self._recorder = Recorder(functools.partial(connect_by_url, database_url), folder)
        self._stopping = False

    def take(self, points: list[Points], findings: list[FindingRow]) -> bool:
        if points:
            self._recorder.record(points)
        if findings:
            self._recorder.findings(findings)
        return self._stopping

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
        """`journal_folder` is this host's; empty on a cluster, where every node chooses its own."""
        self.prefix = prefix
        self._database_url = database_url
        self._journal_folder = journal_folder
        self._actors: dict[str, ray.actor.ActorHandle] = {}

    def ensure(self, node_ids: list[str]) -> None:
        """Starts a recorder on every node that has none yet, and waits until each answers."""
        for node_id in node_ids:
            if node_id not in self._actors:
                self._actors[node_id] = self._start(node_id)
        ray.get([actor.pending.remote() for actor in self._actors.values()], timeout=ANSWER_TIMEOUT_S)

    def stop_trials(self) -> None:
        for actor in self._actors.values():
            actor.stop_trials.remote()

    def close(self, timeout_s: float) -> list[Remainder]:
        """What could not be written in time; it stays in the journals."""
        answers = [actor.close.remote(timeout_s) for actor in self._actors.values()]
        return list(ray.get(answers, timeout=timeout_s + ANSWER_TIMEOUT_S))

    def _start(self, node_id: str) -> ray.actor.ActorHandle:
        return (
            ray.remote(RecorderActor)
            .options(
                name=recorder_name(self.prefix, node_id),
                namespace=NAMESPACE,
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            .remote(self._database_url, self._journal_folder)
        )


def recorder_name(prefix: str, node_id: str) -> str:
    return f"{prefix}-{node_id}"
