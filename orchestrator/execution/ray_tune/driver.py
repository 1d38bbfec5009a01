"""The driver's side: feeds jobs to Tune, one Tune trial each, and hands every outcome back. Points do not pass here."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.execution.tune_controller import TuneController
from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import Searcher

from orchestrator.execution.job import Feed, Job, outcome_from_json
from orchestrator.execution.ray_tune.cluster import Cluster
from orchestrator.execution.ray_tune.recorder_actor import Recorders
from orchestrator.execution.ray_tune.worker import SILENCE_GRACE_S, TrialWorker
from orchestrator.tracking.recorder import Remainder
from orchestrator.trial import Failure, Outcome, TrialState

POLL_S = 0.02
CLOSE_TIMEOUT_S = 60.0


class JobSearcher(Searcher):  # type: ignore[misc]
    """Tune's view of a `Feed`. Never returns None while nothing runs: Tune would sleep and ignore Ctrl-C."""

    def __init__(self, feed: Feed, recorder_prefix: str) -> None:
        super().__init__()
        self._feed = feed
        self._recorder_prefix = recorder_prefix
        self.running: dict[str, tuple[Job, float]] = {}
        self.errors: dict[str, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles the searcher for a snapshot that we never restore

    def set_search_properties(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def suggest(self, trial_id: str) -> dict[str, str] | str | None:
        while True:
            if self._feed.stopping:
                return str(Searcher.FINISHED)
            job = self._feed.next_job()
            if job is not None:
                self.running[trial_id] = (job, time.monotonic())
                return {"job": job.to_json(), "workload": job.workload, "recorder": self._recorder_prefix}
            if self._feed.exhausted():
                return str(Searcher.FINISHED)
            if self.running:
                return None
            time.sleep(POLL_S)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        job, started = self.running.pop(trial_id)
        if result and "outcome" in result:
            self._feed.ended(job, outcome_from_json(result["outcome"]))
        else:
            self._feed.ended(
                job, _outcome_of_dead_worker(job, time.monotonic() - started, self.errors.pop(trial_id, ""))
            )

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

    def __init__(self, feed: Feed, searcher: JobSearcher, recorders: Recorders, num_workers: int) -> None:
        super().__init__()
        self._feed, self._searcher, self._recorders, self._num_workers = feed, searcher, recorders, num_workers
        self._kept = False
        self._told_to_stop = False

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        if (
            not self._kept
        ):  # private in Ray 2.60: Tune would keep one idle worker only (tests check that the name is there)
            self._kept = True
            cache = tune_controller._tune_controller._actor_cache
            cache.increase_max(trial.placement_group_factory, by=self._num_workers)
        super().on_trial_add(tune_controller, trial)

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        self._feed.tick()
        if self._feed.stopping and not self._told_to_stop:
            self._told_to_stop = True
            self._recorders.stop_trials()
        return super().choose_trial_to_run(tune_controller)

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
    recorders.ensure([node.node_id for node in cluster.nodes if node.capacity(cpu, gpu)])
    searcher = JobSearcher(feed, recorders.prefix)
    storage = cluster.scratch / "tune"
    try:
        with no_stealing():
            _tuner(searcher, Slots(feed, searcher, recorders, num_workers), storage, num_workers, cpu, gpu).fit()
    finally:
        shutil.rmtree(storage, ignore_errors=True)
    return recorders.close(CLOSE_TIMEOUT_S)


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
