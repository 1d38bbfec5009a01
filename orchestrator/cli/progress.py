"""What a person sees while a sweep runs: a live summary in a terminal, plain lines elsewhere, JSON for machines."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table as RichTable

from orchestrator.execution.job import Job
from orchestrator.execution.sweep_run import Observer, SweepRun
from orchestrator.reports.table import short
from orchestrator.trial import Finding, Outcome, Severity, TrialState, jsonable

RATE_WINDOW = 20  # endings that the rate and the time left are computed from
MAX_LINES_PER_CHECK = 3  # a bug of the workload is found in every trial; the rest is `orch health`'s


class Tally:
    """The numbers all three displays share."""

    def __init__(self) -> None:
        self.run: SweepRun | None = None
        self.total = 0
        self.best: tuple[float, int] | None = None
        self.endings: list[float] = []
        self.num_found: Counter[Severity] = Counter()
        self._num_lines: Counter[str] = Counter()  # by check

    def opened(self, run: SweepRun, total: int, workers: int) -> None:
        self.run, self.total = run, total
        for row in run.trials.values():  # what an earlier command finished counts too
            if row.state is TrialState.FINISHED:
                self._consider(row.objective, row.number)
        self.endings = [time.monotonic()]

    def started(self, job: Job) -> None:
        """Counted from the run's own states."""

    def ended(self, job: Job, outcome: Outcome, will_retry: bool) -> None:
        self.endings.append(time.monotonic())
        if outcome.state is TrialState.FINISHED:
            self._consider(outcome.objective, job.number)

    def found(self, number: int, finding: Finding) -> None:
        """Counts; says a warning or an error as long as its check has not said enough."""
        self.num_found[finding.severity] += 1
        if finding.severity is Severity.INFO:
            return
        self._num_lines[finding.check_name] += 1
        if self._num_lines[finding.check_name] <= MAX_LINES_PER_CHECK:
            self.said(finding_line(number, finding))
        elif self._num_lines[finding.check_name] == MAX_LINES_PER_CHECK + 1:
            assert self.run is not None
            self.said(f"{finding.check_name} in more trials: orch health {self.run.sweep.name}")

    def _consider(self, value: float | None, number: int) -> None:
        assert self.run is not None
        if value is None or not math.isfinite(value):
            return
        if self.best is None or self.run.spec.metric.better(value, self.best[0]):
            self.best = (value, number)

    def said(self, text: str) -> None:
        """A remark; the displays that print override this."""

    def counts(self) -> dict[TrialState, int]:
        return dict(self.run.counts()) if self.run else {}

    def done(self) -> int:
        return sum(count for state, count in self.counts().items() if state.is_over)

    def trials_per_second(self) -> float | None:
        recent = self.endings[-RATE_WINDOW:]
        if len(recent) < 2 or recent[-1] <= recent[0]:
            return None
        return (len(recent) - 1) / (recent[-1] - recent[0])

    def seconds_left(self) -> float | None:
        rate = self.trials_per_second()
        return None if rate is None else max(0, self.total - self.done()) / rate


class Lines(Tally):
    """One plain line a change of state."""

    def opened(self, run: SweepRun, total: int, workers: int) -> None:
        super().opened(run, total, workers)
        self.said(f"sweep {run.sweep.name}: {total} trials, {self.done()} done, {workers} at once")

    def ended(self, job: Job, outcome: Outcome, will_retry: bool) -> None:
        super().ended(job, outcome, will_retry)
        self.said(ending_line(self, job, outcome, will_retry))
        if outcome.error and outcome.state is TrialState.FAILED and self.counts().get(TrialState.FAILED) == 1:
            self.said(outcome.error.rstrip())

    def said(self, text: str) -> None:
        print(text, flush=True)


class Json(Tally):
    """One JSON object a change of state."""

    def opened(self, run: SweepRun, total: int, workers: int) -> None:
        super().opened(run, total, workers)
        self._print(event="sweep", sweep=run.sweep.name, trials=total, done=self.done(), workers=workers)

    def started(self, job: Job) -> None:
        self._print(event="started", trial=job.number, attempt=job.attempt, run_id=job.run_id)

    def ended(self, job: Job, outcome: Outcome, will_retry: bool) -> None:
        super().ended(job, outcome, will_retry)
        self._print(
            event="ended",
            trial=job.number,
            attempt=job.attempt,
            run_id=job.run_id,
            state=outcome.state,
            objective=outcome.objective,
            diverged_at=outcome.diverged_at,
            reason=outcome.reason,
            will_retry=will_retry,
        )

    def found(self, number: int, finding: Finding) -> None:
        self._print(event="finding", trial=number, **vars(finding))

    def said(self, text: str) -> None:
        self._print(event="note", text=text)

    def _print(self, **fields: Any) -> None:
        print(json.dumps(jsonable(fields)), flush=True)


class LiveTable(Tally):
    """One live summary; failures are printed above it as they happen."""

    def __init__(self, live: Live) -> None:
        super().__init__()
        self._live = live

    def ended(self, job: Job, outcome: Outcome, will_retry: bool) -> None:
        super().ended(job, outcome, will_retry)
        if outcome.state is TrialState.FAILED:
            self.said(ending_line(self, job, outcome, will_retry))
            if outcome.error and self.counts().get(TrialState.FAILED) == 1:
                self.said(outcome.error.rstrip())
        self._live.update(self._drawn())

    def started(self, job: Job) -> None:
        self._live.update(self._drawn())

    def opened(self, run: SweepRun, total: int, workers: int) -> None:
        super().opened(run, total, workers)
        self._live.update(self._drawn())

    def found(self, number: int, finding: Finding) -> None:
        super().found(number, finding)
        self._live.update(self._drawn())

    def said(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def _drawn(self) -> RichTable:
        assert self.run is not None
        counts, rate, left = self.counts(), self.trials_per_second(), self.seconds_left()
        cells = {
            "sweep": self.run.sweep.name,
            "done": f"{self.done()}/{self.total}",
            "running": str(counts.get(TrialState.RUNNING, 0)),
            "failed": str(counts.get(TrialState.FAILED, 0)),
            "diverged": str(counts.get(TrialState.DIVERGED, 0)),
            "findings": findings_in_words(self.num_found),
            f"best {self.run.spec.metric.name}": f"{short(self.best[0])} (trial {self.best[1]})" if self.best else "-",
            "trials/min": f"{rate * 60:.1f}" if rate else "-",
            "left": duration(left) if left is not None else "-",
        }
        table = RichTable(box=None, pad_edge=False)
        for name in cells:
            table.add_column(name)
        table.add_row(*cells.values())
        return table


def ending_line(tally: Tally, job: Job, outcome: Outcome, will_retry: bool) -> str:
    assert tally.run is not None
    axes = " ".join(f"{axis}={short(job.params.get(axis))}" for axis in tally.run.spec.axes)
    parts = [f"{tally.done()}/{tally.total}", f"trial {job.number}", f"{outcome.state}", axes]
    if outcome.objective is not None:
        parts.append(f"{job.metric}={short(outcome.objective)}")
    if outcome.reason:
        parts.append(outcome.reason)
    if will_retry:
        parts.append(f"(attempt {job.attempt} of {tally.run.spec.retries.count + 1}; trying again)")
    return "  ".join(part for part in parts if part)


def finding_line(number: int, finding: Finding) -> str:
    """`trial 3: error no_gradient at step 20: ...`, on one line."""
    at = "" if finding.step is None else f" at step {finding.step}"
    return " ".join(f"trial {number}: {finding.severity} {finding.check_name}{at}: {finding.message}".split())


def findings_in_words(counts: Counter[Severity]) -> str:
    """`2 errors, 1 warning`; infos are counted by themselves only."""
    shown = [(counts[severity], severity) for severity in (Severity.ERROR, Severity.WARNING) if counts[severity]]
    return ", ".join(f"{count} {severity}{'s' * (count > 1)}" for count, severity in shown) or "-"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


@contextlib.contextmanager
def progress(as_json: bool) -> Iterator[Observer]:
    """The display that fits: JSON when asked, live in a terminal, lines elsewhere."""
    if as_json:
        yield Json()
    elif not sys.stdout.isatty():
        yield Lines()
    else:
        with Live("starting ...", console=Console(), refresh_per_second=4, transient=False) as live:
            yield LiveTable(live)
