"""The driver's side: feeds jobs to Tune, one Tune trial each, and hands every outcome back. Points do not pass here."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from ray import tune
from ray.tune.execution.tune_controller import TuneController
from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import Searcher

from orchestrator.execution.job import Feed, Job, outcome_from_json
from orchestrator.execution.ray_tune.arbiter import Arbiter
from orchestrator.execution.ray_tune.cluster import Cluster, alive_nodes
from orchestrator.execution.ray_tune.recorder_actor import Recorders
from orchestrator.execution.ray_tune.worker import SILENCE_GRACE_S, TrialWorker
from orchestrator.tracking.recorder import Remainder
from orchestrator.trial import Failure, Outcome, TrialState

POLL_S = 0.02
CLOSE_TIMEOUT_S = 60.0
LOOK_AROUND_S = 0.5

T = TypeVar("T")


class JobSearcher(Searcher):  # type: ignore[misc]
    """Tune's view of a `Feed`. Never returns None while nothing runs: Tune would sleep and ignore Ctrl-C."""

    def __init__(self, feed: Feed, recorder_prefix: str, arbiter_name: str) -> None:
        super().__init__()
        self._feed = feed
        self._names = {"recorder": recorder_prefix, "arbiter": arbiter_name}  # where workers find them
        self.running: dict[str, tuple[Job, float]] = {}
        self.errors: dict[str, str] = {}
        self.failure: Exception | None = None  # of the feed; raised when Tune has come to its end

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles the searcher for a snapshot that we never restore

    def set_search_properties(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def suggest(self, trial_id: str) -> dict[str, str] | str | None:
        while True:
            if self.stopping:
                return str(Searcher.FINISHED)
            job = self.guarded(self._feed.next_job)
            if job is not None:
                self.running[trial_id] = (job, time.monotonic())
                return {"job": job.to_json(), "workload": job.workload, **self._names}
            if self.failure is not None or self._feed.exhausted():
                return str(Searcher.FINISHED)
            if self.running:
                return None
            time.sleep(POLL_S)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        job, started = self.running.pop(trial_id)
        if result and "outcome" in result:
            outcome = outcome_from_json(result["outcome"])
        else:
            outcome = _outcome_of_dead_worker(job, time.monotonic() - started, self.errors.pop(trial_id, ""))
        self.guarded(lambda: self._feed.ended(job, outcome))

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


def _outcome_of_dead_worker(job: Job, ran_s: float, error: str) -> Outcome:
    if job.trial_time_s and ran_s >= job.trial_time_s + SILENCE_GRACE_S:
        reason = f"no report within trial_time = {job.trial_time_s:g} s; its worker was ended"
        return Outcome(TrialState.FAILED, reason=reason, error=error, failure=Failure.TIMEOUT)
    if "creation task" in error or "died" not in error:  # Ray's words when a worker's set-up raised
        last_line = next((line for line in reversed(error.strip().split("\n")) if line.strip()), "no reason given")
        reason = f"the worker could not start: {last_line}"[:500]
        return Outcome(TrialState.FAILED, reason=reason, error=error, failure=Failure.EXCEPTION)
    kind = re.search(r"exit type: (\w+)", error)
    cause = {"NODE_OUT_OF_MEMORY": "its node ran out of memory"}.get(kind[1] if kind else "", "killed, or a crash")
    reason = f"the worker process died ({cause})"
    return Outcome(TrialState.FAILED, reason=reason, error=error, failure=Failure.WORKER_DEATH)


class Slots(FIFOScheduler):  # type: ignore[misc]
    """Keeps all worker processes through empty moments of the queue, and carries the stop signal and the ticks."""

    def __init__(
        self,
        feed: Feed,
        searcher: JobSearcher,
        recorders: Recorders,
        node_ids: Callable[[], list[str]],
        num_workers: int,
    ) -> None:
        super().__init__()
        self._feed, self._searcher, self._recorders, self._num_workers = feed, searcher, recorders, num_workers
        self._node_ids = node_ids
        self._kept = False
        self._looked_at = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        if not self._kept:  # a private name of Ray 2.60: without this Tune keeps one idle worker only
            self._kept = True
            cache = tune_controller._tune_controller._actor_cache
            cache.increase_max(trial.placement_group_factory, by=self._num_workers)
        super().on_trial_add(tune_controller, trial)

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        self._searcher.guarded(self._feed.tick)
        if time.monotonic() - self._looked_at > LOOK_AROUND_S:
            self._looked_at = time.monotonic()
            self._searcher.guarded(self._look_around)
        return super().choose_trial_to_run(tune_controller)

    def _look_around(self) -> None:
        """Nodes that joined get a recorder; all recorders hear of a stop, also one that has just been restarted."""
        self._recorders.ensure(self._node_ids())
        if self._searcher.stopping:
            self._recorders.stop_trials()

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

    Returns what the recorders could not write in time. Call from the main thread, connected to `cluster`.
    """
    for noisy in ("ray.tune", "ray.air"):  # what they print as errors is a trial's outcome here, told once
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    recorders = Recorders(f"recorder-{uuid.uuid4().hex[:8]}", database_url, journal_folder)

    def node_ids() -> list[str]:
        nodes = cluster.nodes if cluster.is_local else alive_nodes()
        return [node.node_id for node in nodes if node.capacity(cpu, gpu)]

    arbiter_name = f"{recorders.prefix}-arbiter" if feed.case else ""  # nobody judges: such a sweep pays nothing
    arbiter = Arbiter.start(arbiter_name, feed.case, database_url) if feed.case else None
    recorders.ensure(node_ids())
    if arbiter is not None:
        recorders.drain(CLOSE_TIMEOUT_S)  # decisions that a dead command left in its journal count
        feed.judged_by(arbiter)
    searcher = JobSearcher(feed, recorders.prefix, arbiter_name)
    storage = cluster.scratch / "tune"
    try:
        with no_stealing():
            slots = Slots(feed, searcher, recorders, node_ids, num_workers)
            _tuner(searcher, slots, storage, num_workers, cpu, gpu).fit()
    finally:
        shutil.rmtree(storage, ignore_errors=True)
    remainders = recorders.close(CLOSE_TIMEOUT_S)
    if searcher.failure is not None:
        raise searcher.failure
    feed.recorded()
    return remainders


def _tuner(searcher: JobSearcher, slots: Slots, storage: Path, num_workers: int, cpu: float, gpu: float) -> tune.Tuner:
    shutil.rmtree(storage, ignore_errors=True)
    storage.mkdir(mode=0o700, parents=True)
    return tune.Tuner(
        tune.with_resources(TrialWorker, {"cpu": cpu, "gpu": gpu}),
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
