"""What a person sees while a sweep runs: a live summary in a terminal, plain lines elsewhere, JSON for machines."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table as RichTable

from orchestrator.cli.sweep_end import print_end, summary
from orchestrator.detaching import HELD
from orchestrator.ending import SweepEnding
from orchestrator.errors import OrchError
from orchestrator.execution.chronicle import END, Chronicle
from orchestrator.execution.job import Job
from orchestrator.execution.sweep_run import Observer, SweepRun
from orchestrator.reports.table import Format, short
from orchestrator.signals import silence
from orchestrator.trial import Failure, Finding, Outcome, Severity, TrialState, jsonable, shown

RATE_WINDOW = 20  # endings that the rate and the time left are computed from
CLOSE_TIMEOUT_S = 5.0
MAX_LINES_PER_CHECK = 3  # a bug of the workload is found in every trial; the rest is `orch health`'s


class Tally:
    """The numbers all displays share."""

    def __init__(self) -> None:
        self._out = sys.stdout  # while a trial trains in this process, sys.stdout is the trial's
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

    def print_line(self, text: str) -> None:
        """When nobody can read it any more (a terminal that closed, a `tee` that Ctrl-C ended), the sweep stops."""
        try:
            print(shown(text), file=self._out, flush=True)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            silence([1, 2] if os.path.sameopenfile(1, 2) else [1])
            if self.run is not None:
                self.run.interrupt()

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
        self.print_line(text)


class Kept(Lines):
    """The same lines, and when trials start, for whoever follows the sweep from elsewhere."""

    def __init__(self, ready_fd: int | None = None) -> None:
        """`ready_fd`: a pipe to `--detach`, which hears what is said until the sweep is held."""
        super().__init__()
        self._chronicle = Chronicle()
        self._ready_fd = ready_fd

    def opened(self, run: SweepRun, total: int, workers: int) -> None:
        super().opened(run, total, workers)
        self._chronicle.open(run.ledger.engine, run.sweep.id, run.ledger.sweep(run.sweep.id).fence)
        self._tell(HELD)
        if self._ready_fd is not None:
            os.close(self._ready_fd)
            self._ready_fd = None

    def started(self, job: Job) -> None:
        self.said(f"trial {job.number} starts" + (f" (attempt {job.attempt})" if job.attempt > 1 else ""))

    def print_line(self, text: str) -> None:
        self._chronicle.say(text)
        self._tell(f"{text}\n".encode())

    def _tell(self, words: bytes) -> None:
        """Tells `--detach`, if it still listens."""
        if self._ready_fd is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._ready_fd, words)

    def close(self) -> None:
        self._chronicle.close(CLOSE_TIMEOUT_S)


class Told(Observer):
    """Tells one display after another."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def opened(self, run: SweepRun, total: int, workers: int) -> None:
        for observer in self._observers:
            observer.opened(run, total, workers)

    def said(self, text: str) -> None:
        for observer in self._observers:
            observer.said(text)

    def started(self, job: Job) -> None:
        for observer in self._observers:
            observer.started(job)

    def ended(self, job: Job, outcome: Outcome, will_retry: bool) -> None:
        for observer in self._observers:
            observer.ended(job, outcome, will_retry)

    def found(self, number: int, finding: Finding) -> None:
        for observer in self._observers:
            observer.found(number, finding)


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
        self.print_line(json.dumps(jsonable(fields)))


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
        self._live.console.print(shown(text), markup=False, highlight=False)

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
    if will_retry and tally.run.stopping:
        parts.append(f"(attempt {job.attempt}; orch resume tries it again)")
    elif will_retry:
        is_first_of_memory = outcome.failure is Failure.OUT_OF_MEMORY and not job.alone
        parts.append(f"(attempt {job.attempt}; trying again{' alone, after the others' * is_first_of_memory})")
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


def drive(command: Callable[[Observer], SweepEnding], fmt: Format, ready_fd: int | None = None) -> int:
    """Runs a command that drives a sweep, in sight of the person and of whoever follows; returns its exit code."""
    kept = Kept(ready_fd)
    try:
        with display(fmt) as shown:
            ending = command(Told(shown, kept))
        for line in (summary(ending), *ending.remarks):
            kept.said(line)
        kept.said(f"{END} with exit code {ending.exit_code}")
        print_end(ending, fmt)
    except OrchError as error:
        kept.said(f"{END}: {error}")
        raise
    finally:
        kept.close()
    return ending.exit_code


@contextlib.contextmanager
def display(fmt: Format) -> Iterator[Observer]:
    """The one that fits: JSON when asked, live in a terminal, lines elsewhere."""
    if fmt == "json":
        yield Json()
    elif not sys.stdout.isatty():
        yield Lines()
    else:
        console = Console(file=sys.stdout)  # while a trial trains in this process, sys.stdout is the trial's
        with Live("starting ...", console=console, refresh_per_second=4, transient=False) as live:
            yield LiveTable(live)
