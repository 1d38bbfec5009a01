"""The worker's side: one long-lived process trains one trial after another, so torch is imported once."""

from __future__ import annotations

import faulthandler
import traceback
from dataclasses import replace
from typing import Any

import ray
from ray import tune

from orchestrator.execution.failures import MAX_REASON, blames_device
from orchestrator.execution.job import Job, outcome_to_json
from orchestrator.execution.judging import Judge, Unjudged
from orchestrator.execution.printing import captured
from orchestrator.execution.ray_tune.actor_sink import ActorSink
from orchestrator.execution.ray_tune.arbiter import Arbiter
from orchestrator.execution.ray_tune.cluster import NAMESPACE
from orchestrator.execution.ray_tune.recorder_actor import recorder_name
from orchestrator.execution.trial_run import run_trial
from orchestrator.trial import Failure, Outcome, TrialState, in_words
from orchestrator.workload import describe

STDERR = 2  # the descriptor: sys.stderr is the trial's
SILENCE_GRACE_S = 10.0  # after trial_time, how long we wait for a report before the process ends itself


class Spent(Exception):
    """Carries an outcome out of a process that must train no other trial: what it holds of a memory stays held."""


class TrialWorker(tune.Trainable):  # type: ignore[misc]
    """A Tune trainable whose one `step` trains a whole trial; reused, so processes and imports are paid for once."""

    def setup(self, config: dict[str, Any]) -> None:
        self._node_id = ray.get_runtime_context().get_node_id()
        self._sink_actor = ray.get_actor(recorder_name(config["recorder"], self._node_id), namespace=NAMESPACE)
        self._judge: Judge = Arbiter.find(config["arbiter"]) if config["arbiter"] else Unjudged()
        describe(config["workload"]).load()

    def step(self) -> dict[str, Any]:
        job = Job.from_json(self.config["job"])
        _set_watchdog(job)
        try:
            sink = ActorSink(self._sink_actor)
            with captured(job, sink.printed, sink.sync):
                outcome = run_trial(job, sink, self._judge)
        except Exception as error:  # not the workload's, ours: a full journal, a recorder that stays away
            cause = in_words(getattr(error, "cause", error)).strip().split("\n")[0]  # Ray wraps what a recorder raised
            reason = f"its reports could not be kept: {cause}"[:MAX_REASON]
            outcome = Outcome(TrialState.FAILED, reason=reason, error=traceback.format_exc(), failure=Failure.NO_RECORD)
        finally:
            faulthandler.cancel_dump_traceback_later()
        told = outcome_to_json(replace(outcome, node=self._node_id))
        if job.alone or outcome.failure is Failure.OUT_OF_MEMORY or blames_device(outcome):
            raise Spent(told)  # Tune ends the process of a trainable that raised
        return {"outcome": told, "done": True}

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.config = new_config
        return True


def _set_watchdog(job: Job) -> None:
    """Ends this process when a trial stays silent past its time; the driver sees the death and knows the deadline.

    Whatever Python does: a thread of it would wait for ever for a loop in C that keeps the interpreter's lock. Where
    the trial was stands in the worker's log.
    """
    if job.trial_time_s:
        faulthandler.dump_traceback_later(job.trial_time_s + SILENCE_GRACE_S, exit=True, file=STDERR)
