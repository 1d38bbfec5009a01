"""Judges a trial by its reports: did it diverge, did it say what the sweep asks for. Stops and stores nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.execution.job import Job
from orchestrator.trial import Failure, Outcome, TrialState

TRAINING_LOSS = "train/loss"
NONFINITE_PARAMETERS = "params/nonfinite"  # a workload that counts them here is judged by them


@dataclass(frozen=True)
class Divergence:
    """The first report that was not finite, and what was not."""

    step: int
    reason: str


class Verdict:
    """What the reports so far say about the trial, those before the state it went on from included."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.objective: float | None = None
        self.last_step: int | None = None
        self.divergence: Divergence | None = None
        self.keys: set[str] = set()

    def see(self, step: int, metrics: Mapping[str, float]) -> None:
        self.last_step = step
        self.keys.update(metrics)
        self.objective = metrics.get(self.job.metric, self.objective)
        if self.divergence is None and (reason := _divergence(metrics, self.job.metric)):
            self.divergence = Divergence(step, f"{reason} at step {step}")

    def outcome(self, stopped: bool) -> Outcome:
        if self.divergence is not None:
            return self._outcome(TrialState.DIVERGED, self.divergence.reason)
        if stopped:
            return self._outcome(TrialState.KILLED, "interrupted")
        if self.objective is None:
            seen = ", ".join(sorted(self.keys)) or "nothing"
            return self._outcome(
                TrialState.FAILED,
                f"never reported {self.job.metric!r}; it reported {seen}",
                failure=Failure.NO_OBJECTIVE,
            )
        return self._outcome(TrialState.FINISHED)

    def failed(self, reason: str, failure: Failure, error: str = "") -> Outcome:
        """How a trial that broke down ended; what it did after it diverged does not undo that result."""
        if self.divergence is not None:
            return self._outcome(TrialState.DIVERGED, self.divergence.reason, error or reason)
        return self._outcome(TrialState.FAILED, reason.split("\n")[0][:500], error or reason, failure)

    def _outcome(
        self, state: TrialState, reason: str = "", error: str = "", failure: Failure = Failure.NONE
    ) -> Outcome:
        diverged_at = self.divergence.step if self.divergence else None
        return Outcome(state, self.objective, self.last_step, diverged_at, reason, error, failure)


def _divergence(metrics: Mapping[str, float], objective: str) -> str:
    for key in dict.fromkeys((TRAINING_LOSS, objective)):
        value = metrics.get(key, 0.0)
        if not math.isfinite(value):
            return f"{key} is {value}"
    count = metrics.get(NONFINITE_PARAMETERS, 0)
    return f"{count:.0f} parameters are not finite" if count else ""
