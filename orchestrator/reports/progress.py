"""How far a sweep has come, in numbers and in words, by what its driver says. Reads no database and prints nothing."""

from __future__ import annotations

import math
import time
from collections import Counter

from orchestrator.execution.job import Job
from orchestrator.execution.sweep_run import SweepRun
from orchestrator.reports.table import short
from orchestrator.trial import Failure, Finding, Outcome, Severity, TrialState

RATE_WINDOW = 20  # endings that the rate and the time left are computed from
MAX_LINES_PER_CHECK = 3  # a bug of the workload is found in every trial; the rest is `orch health`'s


class Progress:
    """Of the sweep that a command drives; what earlier commands finished counts too."""

    def __init__(self, run: SweepRun, total: int) -> None:
        """`total`: how many trials the sweep will have."""
        self.run, self.total = run, total
        self._best: tuple[float, int] | None = None  # objective, trial
        self._endings = [time.monotonic()]
        self._num_found: Counter[Severity] = Counter()
        self._num_lines: Counter[str] = Counter()  # by check
        for row in run.trials.values():
            if row.state is TrialState.FINISHED:
                self._consider(row.objective, row.number)

    def ended(self, job: Job, outcome: Outcome) -> None:
        self._endings.append(time.monotonic())
        if outcome.state is TrialState.FINISHED:
            self._consider(outcome.objective, job.number)

    def found(self, number: int, finding: Finding) -> str:
        """What to say of a finding about trial `number`; empty for an info, or where its check has said enough."""
        self._num_found[finding.severity] += 1
        if finding.severity is Severity.INFO:
            return ""
        self._num_lines[finding.check_name] += 1
        if self._num_lines[finding.check_name] <= MAX_LINES_PER_CHECK:
            return _finding_line(number, finding)
        if self._num_lines[finding.check_name] == MAX_LINES_PER_CHECK + 1:
            return f"{finding.check_name} in more trials: orch health {self.run.sweep.name}"
        return ""

    @property
    def num_done(self) -> int:
        return sum(count for state, count in self.run.trials.counts().items() if state.is_over)

    def ending_line(self, job: Job, outcome: Outcome, will_retry: bool) -> str:
        axes = " ".join(f"{axis}={short(job.params.get(axis))}" for axis in self.run.spec.axes)
        parts = [f"{self.num_done}/{self.total}", f"trial {job.number}", f"{outcome.state}", axes]
        if outcome.objective is not None:
            parts.append(f"{job.metric}={short(outcome.objective)}")
        if outcome.reason:
            parts.append(outcome.reason)
        if will_retry and self.run.stopping:
            parts.append(f"(attempt {job.attempt}; orch resume tries it again)")
        elif will_retry:
            is_first_of_memory = outcome.failure is Failure.OUT_OF_MEMORY and not job.alone
            parts.append(f"(attempt {job.attempt}; trying again{' alone, after the others' * is_first_of_memory})")
        return "  ".join(part for part in parts if part)

    def first_error(self, outcome: Outcome) -> str:
        """The traceback if it is that of the sweep's only failed trial: further ones are in `orch logs`; else empty."""
        is_first = outcome.state is TrialState.FAILED and self.run.trials.counts()[TrialState.FAILED] == 1
        return outcome.error.rstrip() if is_first else ""

    def in_words(self) -> dict[str, str]:
        """One line of a table, by column."""
        counts, rate = self.run.trials.counts(), self._trials_per_second()
        left_s = None if rate is None else max(0, self.total - self.num_done) / rate
        return {
            "sweep": self.run.sweep.name,
            "done": f"{self.num_done}/{self.total}",
            "running": str(counts[TrialState.RUNNING]),
            "failed": str(counts[TrialState.FAILED]),
            "diverged": str(counts[TrialState.DIVERGED]),
            "findings": _findings_in_words(self._num_found),
            f"best {self.run.spec.metric.name}": f"{short(self._best[0])} (trial {self._best[1]})"
            if self._best
            else "-",
            "trials/min": f"{rate * 60:.1f}" if rate else "-",
            "left": _duration(left_s) if left_s is not None else "-",
        }

    def _consider(self, value: float | None, number: int) -> None:
        if value is None or not math.isfinite(value):
            return
        if self._best is None or self.run.spec.metric.better(value, self._best[0]):
            self._best = (value, number)

    def _trials_per_second(self) -> float | None:
        recent = self._endings[-RATE_WINDOW:]
        if len(recent) < 2 or recent[-1] <= recent[0]:
            return None
        return (len(recent) - 1) / (recent[-1] - recent[0])


def _finding_line(number: int, finding: Finding) -> str:
    """`trial 3: error no_gradient at step 20: ...`, on one line."""
    at = "" if finding.step is None else f" at step {finding.step}"
    return " ".join(f"trial {number}: {finding.severity} {finding.check_name}{at}: {finding.message}".split())


def _findings_in_words(counts: Counter[Severity]) -> str:
    """`2 errors, 1 warning`; infos are counted by themselves only."""
    shown = [(counts[severity], severity) for severity in (Severity.ERROR, Severity.WARNING) if counts[severity]]
    return ", ".join(f"{count} {severity}{'s' * (count > 1)}" for count, severity in shown) or "-"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
