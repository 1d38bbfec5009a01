"""Judges a trial by what it says: did it diverge, must it stop, did it report the objective. Stores nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from orchestrator.execution.job import Job
from orchestrator.execution.judging import SAVES
from orchestrator.trial import Action, Decision, Failure, Finding, Outcome, Severity, TrialState

TRAINING_LOSS = "train/loss"
NONFINITE_PARAMETERS = "params/nonfinite"  # a workload that counts them here is judged by them
MAX_REASON = 500  # characters


@dataclass(frozen=True)
class Divergence:
    """The first report that was not finite, and what was not."""

    step: int
    reason: str


class Ending(Enum):
    """Why a trial's reports came to an end, when nothing broke."""

    COMPLETE = auto()  # there is no more, or no need for more
    INTERRUPTED = auto()  # the sweep is being stopped
    PAUSED = auto()  # the scheduler wants it so; the state is saved


class Verdict:
    """What the trial has said so far, before the state it went on from included."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.objective: float | None = None
        self.more_objectives: list[float | None] = [None] * len(job.more_metrics)
        self.last_step: int | None = None
        self.divergence: Divergence | None = None
        self.stop_reason = ""  # the first finding that ends the trial at its next report, or the scheduler's reason
        self.decision: Decision | None = None  # the scheduler's at the last report
        self._is_first = True  # the report that was seen last
        self.is_over = False  # as of the last report: nothing more is to be trained
        self.keys: set[str] = set()
        self.read: set[str] = set()  # swept fields whose value the trial has read

    def see(self, step: int, metrics: Mapping[str, float]) -> None:
        self._is_first = self.last_step is None and self.job.first_step == 0
        self.last_step = step
        self.keys.update(metrics)
        self.objective = metrics.get(self.job.metric, self.objective)
        self.more_objectives = [
            metrics.get(name, before) for name, before in zip(self.job.more_metrics, self.more_objectives, strict=True)
        ]
        if self.divergence is None and (reason := _divergence(metrics, (self.job.metric, *self.job.more_metrics))):
            self.divergence = Divergence(step, f"{reason} at step {step}")
        self.obey(None)

    def obey(self, decision: Decision | None) -> None:
        """Takes in what the scheduler says to the last report, and so whether the trial is over."""
        self.decision = decision
        if decision is not None and decision.action is Action.STOP:
            self.stop_reason = self.stop_reason or decision.reason[:MAX_REASON]
        is_spared = self.is_pausing or (bool(self.job.population) and decision is None)  # it may copy another
        ends = self.divergence is not None and self.job.stop_diverged and not is_spared
        self.is_over = bool(self.stop_reason) or ends
        if self.is_over and self._is_first:
            self.read.update(self.job.axes)  # a trial that ends so early may not have come to read them: not judged

    @property
    def is_pausing(self) -> bool:
        """True if the trial is to save its state of the last report and to make room."""
        return self.decision is not None and self.decision.action in SAVES and not self.stop_reason

    def hear(self, finding: Finding) -> None:
        """A note ends nothing: an odd batch is no reason to stop."""
        is_serious = finding.severity is not Severity.INFO
        if is_serious and finding.check_name in self.job.stop_on and not self.stop_reason:
            self.stop_reason = _one_line(finding)

    def memory(self) -> dict[str, Any]:
        """What the next attempt would not learn by going on from here; for `recall`."""
        return {
            "divergence": self.divergence and [self.divergence.step, self.divergence.reason],
            "stop_reason": self.stop_reason,
            "read": sorted(self.read),
            "reported": [self.last_step, self.objective, self.more_objectives],
        }

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Adds what an earlier attempt knew when it saved the state from which this one goes on."""
        if self.divergence is None and memory["divergence"]:
            self.divergence = Divergence(*memory["divergence"])
        self.stop_reason = self.stop_reason or memory["stop_reason"]
        self.read.update(memory["read"])
        if self.last_step is None:
            self.last_step, self.objective, self.more_objectives = memory["reported"]

    def paused(self) -> Outcome:
        """How an attempt ended whose state is saved because the scheduler wants it so."""
        assert self.decision is not None
        return self._outcome(TrialState.WAITING, f"{self.decision.action}: {self.decision.reason}"[:MAX_REASON])

    def outcome(self, stopped: bool) -> Outcome:
        """How a trial ended that did not break down; `stopped`: because the sweep was."""
        if self.divergence is not None:
            return self._outcome(TrialState.DIVERGED, self.divergence.reason)
        is_unheard = self.decision is not None and self.objective is None  # it came to `max_steps` without a word
        if self.stop_reason and self.is_over and not is_unheard:
            return self._outcome(TrialState.STOPPED, self.stop_reason)
        if stopped:
            return self._outcome(TrialState.KILLED, "interrupted")
        names, values = (self.job.metric, *self.job.more_metrics), (self.objective, *self.more_objectives)
        if missing := [repr(name) for name, value in zip(names, values, strict=True) if value is None]:
            seen = ", ".join(sorted(self.keys)) or "nothing"
            reason = f"never reported {', '.join(missing)}; it reported {seen}"
            return self._outcome(TrialState.FAILED, reason, failure=Failure.NO_OBJECTIVE)
        return self._outcome(TrialState.FINISHED)

    def failed(self, reason: str, failure: Failure, error: str = "") -> Outcome:
        """How a trial that broke down ended; what it did after it diverged does not undo that result."""
        if self.divergence is not None:
            return self._outcome(TrialState.DIVERGED, self.divergence.reason, error or reason)
        line = reason.split("\n")[0][:MAX_REASON]
        return self._outcome(TrialState.FAILED, line, error or (reason if reason != line else ""), failure)

    def _outcome(
        self, state: TrialState, reason: str = "", error: str = "", failure: Failure = Failure.NONE
    ) -> Outcome:
        return Outcome(
            state,
            self.objective,
            self.last_step,
            diverged_at=self.divergence.step if self.divergence else None,
            reason=reason,
            error=error,
            failure=failure,
            more_objectives=tuple(self.more_objectives),
        )


def _divergence(metrics: Mapping[str, float], objectives: Sequence[str]) -> str:
    for key in dict.fromkeys((TRAINING_LOSS, *objectives)):
        value = metrics.get(key, 0.0)
        if not math.isfinite(value):
            return f"{key} is {value}"
    count = metrics.get(NONFINITE_PARAMETERS, 0)
    return f"{count:.0f} parameters are not finite" if count else ""


def _one_line(finding: Finding) -> str:
    """`router_collapsed at step 120: 93 % of the tokens choose expert 2`."""
    at = "" if finding.step is None else f" at step {finding.step}"
    return " ".join(f"{finding.check_name}{at}: {finding.message}".split())[:MAX_REASON]
