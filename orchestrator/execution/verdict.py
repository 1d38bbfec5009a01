"""Judges a trial by what it says: did it diverge, must it stop, did it report the objective. Stores nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.execution.job import Job
from orchestrator.trial import Failure, Finding, Outcome, Severity, TrialState

TRAINING_LOSS = "train/loss"
NONFINITE_PARAMETERS = "params/nonfinite"  # a workload that counts them here is judged by them
MAX_REASON = 500  # characters


@dataclass(frozen=True)
class Divergence:
    """The first report that was not finite, and what was not."""

    step: int
    reason: str


class Verdict:
    """What the trial has said so far, before the state it went on from included."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.objective: float | None = None
        self.last_step: int | None = None
        self.divergence: Divergence | None = None
        self.stop_reason = ""  # the first finding that ends the trial at its next report
        self.is_over = False  # as of the last report: nothing more is to be trained
        self.keys: set[str] = set()
        self.read: set[str] = set()  # swept fields whose value the trial has read

    def see(self, step: int, metrics: Mapping[str, float]) -> None:
        is_first = self.last_step is None and self.job.first_step == 0
        self.last_step = step
        self.keys.update(metrics)
        self.objective = metrics.get(self.job.metric, self.objective)
        if self.divergence is None and (reason := _divergence(metrics, self.job.metric)):
            self.divergence = Divergence(step, f"{reason} at step {step}")
        self.is_over = bool(self.stop_reason) or (self.divergence is not None and self.job.stop_diverged)
        if self.is_over and is_first:
            self.read.update(self.job.axes)  # a trial that ends so early may not have come to read them: not judged

    def hear(self, finding: Finding) -> None:
        """A note ends nothing: an odd batch is no reason to stop."""
        is_serious = finding.severity is not Severity.INFO
        if is_serious and finding.check_name in self.job.stop_on and not self.stop_reason:
            self.stop_reason = _one_line(finding)

    def memory(self) -> dict[str, Any]:
        """What the next attempt would not learn by going on from here; for `recall`."""
        divergence = self.divergence and [self.divergence.step, self.divergence.reason]
        return {"divergence": divergence, "stop_reason": self.stop_reason, "read": sorted(self.read)}

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Adds what an earlier attempt knew when it saved the state from which this one goes on."""
        if self.divergence is None and memory["divergence"]:
            self.divergence = Divergence(*memory["divergence"])
        self.stop_reason = self.stop_reason or memory["stop_reason"]
        self.read.update(memory["read"])

    def outcome(self, stopped: bool) -> Outcome:
        """How a trial ended that did not break down; `stopped`: because the sweep was."""
        if self.divergence is not None:
            return self._outcome(TrialState.DIVERGED, self.divergence.reason)
        if self.stop_reason and self.is_over:
            return self._outcome(TrialState.STOPPED, self.stop_reason)
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
        return self._outcome(TrialState.FAILED, reason.split("\n")[0][:MAX_REASON], error or reason, failure)

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


def _one_line(finding: Finding) -> str:
    """`router_collapsed at step 120: 93 % of the tokens choose expert 2`."""
    at = "" if finding.step is None else f" at step {finding.step}"
    return " ".join(f"{finding.check_name}{at}: {finding.message}".split())[:MAX_REASON]
