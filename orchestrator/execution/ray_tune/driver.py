"""The driver's side: feeds jobs to Tune, one Tune trial each, and hands every outcome back. Points do not pass here."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray import tune
from ray.tune.execution.tune_controller import TuneController
from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import Searcher

from orchestrator.execution.failures import MAX_REASON
from orchestrator.execution.job import Feed, Job, outcome_from_json
from orchestrator.execution.ray_tune.arbiter import Arbiter
from orchestrator.execution.ray_tune.cluster import Cluster, Node, alive_nodes, node_of_actor
from orchestrator.execution.ray_tune.pulse import watched, why_dead
from orchestrator.execution.ray_tune.recorder_actor import KIND, Recorders
from orchestrator.execution.ray_tune.worker import SILENCE_GRACE_S, Spent, TrialWorker
from orchestrator.execution.stopping import ANSWER_S
from orchestrator.tracking.recorder import Remainder
from orchestrator.trial import Failure, Outcome, TrialState

POLL_S = 0.02
CLOSE_TIMEOUT_S = 60.0
LOOK_AROUND_S = 0.5
NODE_LABEL = "ray.io/node-id"  # Ray gives it to every node
ACTOR_ID = re.compile(r"actor_id[:=] ?([0-9a-f]{32})")  # in Ray's words about a worker that died
MEMORY_MONITOR = re.compile(r"killed due to the node running low on memory|exit type: NODE_OUT_OF_MEMORY")
SPENT = re.compile(rf"\b{Spent.__name__}: (\{{.*\}})$", re.MULTILINE)

T = TypeVar("T")


class JobSearcher(Searcher):  # type: ignore[misc]
    """Tune's view of a `Feed`. Never returns None while nothing runs: Tune would sleep and ignore Ctrl-C."""

    def __init__(self, feed: Feed, recorders: Recorders, arbiter_name: str, room: Callable[[], int]) -> None:
        """`room`: for how many workers there is place; at least one."""
        super().__init__()
        self._feed, self._recorders, self._room = feed, recorders, room
        self._names = {"recorder": recorders.prefix, "arbiter": arbiter_name}  # where workers find them
        self.running: dict[str, tuple[Job, float]] = {}
        self.errors: dict[str, str] = {}
        self.overdue: set[str] = set()  # whose workers were ended since they did not stop in time
        self.failure: Exception | None = None  # of the feed; raised when Tune has come to its end

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles the searcher for a snapshot that we never restore

    def set_search_properties(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        while True:
            if self.stopping:
                return str(Searcher.FINISHED)
            if len(self.running) >= self._room():
                return None
            job = self.guarded(self._feed.next_job)
            if job is not None:
                self.running[trial_id] = (job, time.monotonic())
                self._recorders.accounts.began(job)
                place = {"alone": job.alone, "avoid": sorted(self._feed.avoided)}
                return {"job": job.to_json(), "workload": job.workload, **self._names, **place}
            if self.failure is not None or self._feed.exhausted():
                return str(Searcher.FINISHED)
            if self.running:
                return None
            time.sleep(POLL_S)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        job, started = self.running.pop(trial_id)
        error_text = self.errors.pop(trial_id, "")
        if told := result.get("outcome") if result else _told_by_spent_worker(error_text):
            outcome = outcome_from_json(told)
        elif trial_id in self.overdue:
            reason = f"it did not stop within {ANSWER_S:g} s; its worker was ended"
            outcome = Outcome(TrialState.KILLED, reason=reason)
        else:
            outcome = self._of_dead_worker(job, time.monotonic() - started, error_text)
        self._recorders.accounts.ended(job, outcome.node)
        self.guarded(lambda: self._feed.ended(job, outcome))

    def _of_dead_worker(self, job: Job, ran_s: float, error: str) -> Outcome:
        if why := why_dead():  # with it all workers die: no fault of their trials
            self._feed.broken(why)
        actor = ACTOR_ID.search(error)
        outcome = replace(_outcome_of_dead_worker(job, ran_s, error), node=node_of_actor(actor[1]) if actor else "")
        if outcome.failure is Failure.WORKER_DEATH and self._recorders.memory_kill(outcome.node):
            reason = "the kernel killed the worker process for want of memory"
            return replace(outcome, failure=Failure.OUT_OF_MEMORY, reason=reason)
        return outcome

    @property
    def stopping(self) -> bool:
        return self._feed.stopping or self.failure is not None

    def guarded(self, call: Callable[[], T]) -> T | None:
        """Keeps an error of the feed (the database is lost, ...) for later: Tune would wrap it into its own."""
        try:
            return call()
        except Exception as error:
            self.failure = self.failure or error
            return None

    def save(self, checkpoint_path: str) -> None:
        """Nothing to save: the ledger is the truth."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing to restore: the ledger is the truth."""


def _told_by_spent_worker(error: str) -> str:
    """The outcome that a worker's `Spent` carries; empty for any other end."""
    found = SPENT.findall(error)
    return str(found[-1]) if found else ""


def _outcome_of_dead_worker(job: Job, ran_s: float, error: str) -> Outcome:
    if job.trial_time_s and ran_s >= job.trial_time_s + SILENCE_GRACE_S:
        reason = f"no report within trial_time = {job.trial_time_s:g} s; its worker was ended"
        return Outcome(TrialState.FAILED, reason=reason, error=error, failure=Failure.TIMEOUT)
    is_gone = "died" in error or "is unavailable" in error  # the latter where its whole machine went
    if MEMORY_MONITOR.search(error):
        reason = "Ray ended the worker process because its node was running low on memory"
        return Outcome(TrialState.FAILED, reason=reason, error=error, failure=Failure.OUT_OF_MEMORY)
    if "creation task" in error or not is_gone:  # Ray's words when a worker's set-up raised
        last_line = next((line for line in reversed(error.strip().split("\n")) if line.strip()), "no reason given")
        reason = f"the worker could not start: {last_line}"[:MAX_REASON]
        return Outcome(TrialState.FAILED, reason=reason, error=error, failure=Failure.WORKER_START)
    reason = "the worker process died (killed, or a crash)"
    return Outcome(TrialState.FAILED, reason=reason, error=error, failure=Failure.WORKER_DEATH)


class Slots(FIFOScheduler):  # type: ignore[misc]
    """Keeps all worker processes through empty moments of the queue, and carries the stop signal and the ticks."""

    def __init__(
        self,
        feed: Feed,
        searcher: JobSearcher,
        recorders: Recorders,
        nodes: Callable[[], list[Node]],
        num_workers: int,
    ) -> None:
        super().__init__()
        self._feed, self._searcher, self._recorders, self._num_workers = feed, searcher, recorders, num_workers
        self._nodes = nodes
        self._kept: Any = None  # how the workers are placed that stay
        self._looked_at = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        placement = trial.placement_group_factory
        if placement != self._kept:  # a private name of Ray 2.60: without this Tune keeps one idle worker only
            cache = tune_controller._tune_controller._actor_cache
            cache.increase_max(placement, by=self._num_workers)
            if self._kept is not None:  # workers that are placed otherwise go as soon as they are idle
                cache.decrease_max(self._kept, by=self._num_workers)
            self._kept = placement
        super().on_trial_add(tune_controller, trial)

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        self._searcher.guarded(self._feed.tick)
        if time.monotonic() - self._looked_at > LOOK_AROUND_S:
            self._looked_at = time.monotonic()
            self._searcher.guarded(self._look_around)
            if self._feed.overdue:
                self._end_workers(tune_controller._tune_controller)
        return super().choose_trial_to_run(tune_controller)

    def _look_around(self) -> None:
        """Nodes that joined get a recorder; all recorders hear of a stop, also one that has just been restarted."""
        hosts = {node.node_id: node.host for node in self._nodes()}
        self._recorders.ensure(hosts)
        self._recorders.ask_others(hosts)
        self._recorders.listen()
        self._feed.troubled(*self._recorders.errors)
        self._feed.placeable(hosts)
        if self._searcher.stopping:
            self._recorders.stop_trials()

    def _end_workers(self, controller: Any) -> None:
        """Ends the workers of all trials that run. Private names of Ray 2.60, guarded as `no_stealing` is."""
        workers = controller._actor_manager._live_actors_to_ray_actors_resources
        for trial, tracked in list(controller._trial_to_actor.items()):
            if tracked in workers and trial.trial_id in self._searcher.running.keys() - self._searcher.overdue:
                self._searcher.overdue.add(trial.trial_id)
                ray.kill(workers[tracked][0])

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        file = trial.error_file
        if file and Path(file).exists():
            self._searcher.errors[trial.trial_id] = Path(file).read_text(errors="replace")
        super().on_trial_error(tune_controller, trial)


@contextlib.contextmanager
def no_stealing() -> Iterator[None]:
    """A staged trial whose own worker is still starting keeps that worker.

    Ray 2.60 gives the trial to the first free worker and kills the starting one, so with short trials the second worker
    never lives. Private name, guarded by a test and the pin `ray==2.60.*`.
    """
    reuse = TuneController._maybe_reuse_cached_actor

    def keep(self: Any, trial: Any) -> bool:
        actor = self._trial_to_actor.get(trial)
        if actor is not None and self._actor_manager.is_actor_started(actor):
            return False
        return bool(reuse(self, trial))

    TuneController._maybe_reuse_cached_actor = keep
    try:
        yield
    finally:
        TuneController._maybe_reuse_cached_actor = reuse


def run_on_ray(
    feed: Feed, cluster: Cluster, *, num_workers: int, cpu: float, gpu: float, database_url: str, journal_folder: str
) -> list[Remainder]:
    """Runs every job of `feed` on `num_workers` reused worker processes of `cpu` CPUs and `gpu` GPUs each.

    `journal_folder`: see `RecorderActor`. Returns what the recorders could not write in time, or took with them. Call
    from the main thread, connected to `cluster`.
    """
    for noisy in ("ray.tune", "ray.air"):  # what they print as errors is a trial's outcome here, told once
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    recorders = Recorders(f"{KIND}{uuid.uuid4().hex[:8]}", database_url, journal_folder)

    def nodes() -> list[Node]:
        return [node for node in (cluster.nodes if cluster.is_local else alive_nodes()) if node.capacity(cpu, gpu)]

    def room() -> int:
        if not feed.avoided:
            return num_workers
        fits = sum(node.capacity(cpu, gpu) for node in nodes() if node.node_id not in feed.avoided)
        return max(1, min(num_workers, fits))

    arbiter_name = f"arbiter-of-{recorders.prefix}" if feed.case else ""  # nobody judges: such a sweep pays nothing
    arbiter = Arbiter.start(arbiter_name, feed.case, database_url) if feed.case else None
    recorders.ensure({node.node_id for node in nodes()})
    if arbiter is not None:
        recorders.drain(CLOSE_TIMEOUT_S)  # decisions that a dead command left in its journal count
        feed.judged_by(arbiter)
    searcher = JobSearcher(feed, recorders, arbiter_name, room)
    storage = cluster.scratch / "tune"
    try:
        with no_stealing(), watched(feed.broken):
            slots = Slots(feed, searcher, recorders, nodes, num_workers)
            _tuner(searcher, slots, storage, num_workers, cpu, gpu).fit()
    finally:
        shutil.rmtree(storage, ignore_errors=True)
    remainders = recorders.close(CLOSE_TIMEOUT_S, lambda: {node.node_id for node in nodes()})
    if searcher.failure is not None:
        raise searcher.failure
    feed.recorded()
    return remainders


def placement_of(cpu: float, gpu: float, config: Mapping[str, Any]) -> tune.PlacementGroupFactory:
    """Where the worker of a trial goes: to any node but the avoided ones.

    Tune gives a trial only workers that were placed as it is. One that trains alone is placed as no other is: it gets a
    new process, and those of the others, with all that they hold of a GPU's memory, end before.
    """
    avoid: Sequence[str] = config["avoid"]
    selector = {"bundle_label_selector": [{NODE_LABEL: f"!in({','.join(avoid)})"}]} if avoid else {}
    strategy = "STRICT_PACK" if config["alone"] else "PACK"  # the same for a single bundle
    return tune.PlacementGroupFactory([{"CPU": cpu, "GPU": gpu}], strategy=strategy, **selector)


def _tuner(searcher: JobSearcher, slots: Slots, storage: Path, num_workers: int, cpu: float, gpu: float) -> tune.Tuner:
    shutil.rmtree(storage, ignore_errors=True)
    storage.mkdir(mode=0o700, parents=True)
    return tune.Tuner(
        tune.with_resources(TrialWorker, functools.partial(placement_of, cpu, gpu)),
        tune_config=tune.TuneConfig(
            search_alg=searcher,
            scheduler=slots,
            num_samples=-1,
            max_concurrent_trials=num_workers,
            reuse_actors=True,
            trial_dirname_creator=lambda trial: trial.trial_id,
        ),
        run_config=tune.RunConfig(
            name="sweep",
            storage_path=str(storage),
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=0),  # the ledger decides about another attempt
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
        ),
    )
