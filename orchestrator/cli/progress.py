"""What a person sees while a sweep runs: a live summary in a terminal, plain lines elsewhere, JSON for machines."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast

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
from orchestrator.reports.progress import Progress
from orchestrator.reports.table import Format
from orchestrator.signals import silence
from orchestrator.trial import Finding, Outcome, TrialState, jsonable, shown

CLOSE_TIMEOUT_S = 5.0


class Output:
    """A stream that calls `unread`, and leads nowhere from then on, when nobody can read it any more.

    A disk that is full costs it what is said meanwhile, as far as its buffer does not hold it, and no more.
    """

    def __init__(self, stream: TextIO, unread: Callable[[], None]) -> None:
        self._stream, self._unread = stream, unread
        self._is_terminal = stream.isatty()

    def write(self, text: str) -> int:
        with self._read_by_somebody():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._read_by_somebody():
            self._stream.flush()

    def isatty(self) -> bool:
        """As it was at first: a table that asks a closed terminal would stop drawing and never meet the error."""
        return self._is_terminal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _read_by_somebody(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return  # `orch logs` has it
            if error.errno not in (errno.EPIPE, errno.EIO):  # a `tee` that Ctrl-C ended, a terminal that closed
                raise
            silence([1, 2] if os.path.sameopenfile(1, 2) else [1])
            self._unread()


class Display:
    """What all displays share. A sweep whose output nobody can read any more stops."""

    progress: Progress  # from `opened` on

    def __init__(self) -> None:
        self._out = Output(sys.stdout, self._stop)  # while a trial trains in this process, sys.stdout is the trial's
        self._is_unread = False
        self._run: SweepRun | None = None

    def opened(self, run: SweepRun, total: int, workers: int) -> None:
        self.progress, self._run = Progress(run, total), run
        if self._is_unread:
            run.interrupt()

    def _stop(self) -> None:
        self._is_unread = True
        if self._run is not None:
            self._run.interrupt()

    def started(self, job: Job) -> None:
        """Counted from the run's own states."""

    def ended(self, job: Job, outcome: Outcome, will_retry: bool) -> None:
        self.progress.ended(job, outcome)

    def found(self, number: int, finding: Finding) -> None:
        if line := self.progress.found(number, finding):
            self.said(line)

    def said(self, text: str) -> None:
        """A remark; the displays that print override this."""

    def say_ending(self, job: Job, outcome: Outcome, will_retry: bool) -> None:
        self.said(self.progress.ending_line(job, outcome, will_retry))
        if error := self.progress.first_error(outcome):
            self.said(error)

    def print_line(self, text: str) -> None:
        print(shown(text), file=self._out, flush=True)


class Lines(Display):
    """One plain line a change of state."""

    def opened(self, run: SweepRun, total: int, workers: int) -> None:
        super().opened(run, total, workers)
        self.said(f"sweep {run.sweep.name}: {total} trials, {self.progress.num_done} done, {workers} at once")

    def ended(self, job: Job, outcome: Outcome, will_retry: bool) -> None:
        super().ended(job, outcome, will_retry)
        self.say_ending(job, outcome, will_retry)

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


class Json(Display):
    """One JSON object a change of state."""

    def opened(self, run: SweepRun, total: int, workers: int) -> None:
        super().opened(run, total, workers)
        self._print(event="sweep", sweep=run.sweep.name, trials=total, done=self.progress.num_done, workers=workers)

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


class LiveTable(Display):
    """One live summary; failures are printed above it as they happen."""

    def __init__(self) -> None:
        super().__init__()
        console = Console(file=cast(TextIO, self._out))
        self.live = Live("starting ...", console=console, refresh_per_second=4, transient=False)

    def ended(self, job: Job, outcome: Outcome, will_retry: bool) -> None:
        super().ended(job, outcome, will_retry)
        if outcome.state is TrialState.FAILED:
            self.say_ending(job, outcome, will_retry)
        self.live.update(self._drawn())

    def started(self, job: Job) -> None:
        self.live.update(self._drawn())

    def opened(self, run: SweepRun, total: int, workers: int) -> None:
        super().opened(run, total, workers)
        self.live.update(self._drawn())

    def found(self, number: int, finding: Finding) -> None:
        super().found(number, finding)
        self.live.update(self._drawn())

    def said(self, text: str) -> None:
        self.live.console.print(shown(text), markup=False, highlight=False)

    def _drawn(self) -> RichTable:
        cells = self.progress.in_words()
        table = RichTable(box=None, pad_edge=False)
        for name in cells:
            table.add_column(name)
        table.add_row(*cells.values())
        return table


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
    except (OrchError, OSError) as error:
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
        table = LiveTable()
        with table.live:
            yield table
