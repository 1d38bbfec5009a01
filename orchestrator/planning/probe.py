"""Trains the first steps of one trial of each kind, to foretell a sweep's minutes and memory. Records nothing.

The trials run one after another in a process of its own, `python -m orchestrator.planning.probe`: neither torch nor a
crash of theirs reaches the command, and the peak of its memory is theirs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from orchestrator.checking import ending_in_words
from orchestrator.errors import NoResult
from orchestrator.execution.job import Job
from orchestrator.planning.cost import Estimate, Kind, estimate, kinds_of
from orchestrator.spec import SweepSpec
from orchestrator.trial import Decision, Finding
from orchestrator.workload import Description, describe

BUDGET_S = 60.0  # of all kinds together; what is loaded before the first step counts
MIN_SHARE_S = 1.0  # of one kind: with more than a minute's worth of kinds the last ones are not measured
MAX_SHARE_S = 15.0
GRACE_S = 5.0  # for a step that is long
MANY = 8  # kinds named in one line


@dataclass(frozen=True)
class Timing:
    """How far one trial came: the moments of its reports, in seconds after its begin."""

    ended: bool  # it came to its end
    seconds: float
    reports: Sequence[tuple[int, float]]  # step, moment
    peak_bytes: int  # of the process, this trial and those before it
    keys: Sequence[str]  # metrics it reported
    error: str = ""

    def whole_trial_s(self, steps: int | None) -> float | None:
        """Seconds of the whole trial: measured to its end, or extrapolated; None when there is nothing to go by.

        The first report holds what happens once (compilation, allocation), so that the rate is that of later ones,
        where there are some.
        """
        if self.ended:
            return self.seconds
        if steps is None or not self.reports:
            return None
        first_step, first_moment = self.reports[0]
        pairs = pairwise(self.reports)
        rates = [(later - moment) / (after - step) for (step, moment), (after, later) in pairs if after > step]
        rate = median(rates) if rates else first_moment / max(first_step, 1)
        return first_moment + max(0, steps - first_step) * rate


def from_probe(spec: SweepSpec, workload: Description, budget_s: float = BUDGET_S) -> tuple[Estimate, list[str]]:
    """The sweep's cost after its first steps, and what else these showed. Raises NoResult if none could be timed."""
    kinds = kinds_of(spec, workload)
    started = time.monotonic()
    timings = timings_of(spec, workload, kinds, budget_s)
    pairs = list(zip(kinds, timings, strict=False))
    failed = {id(kind): timing.error for kind, timing in pairs if timing.error}
    rest = ((kind, timing.whole_trial_s(kind.steps)) for kind, timing in pairs if not timing.error)
    known = {id(kind): seconds for kind, seconds in rest if seconds is not None}
    if not known:
        nothing = "it counts no steps and is long" if timings else f"nothing was reported in {budget_s:.0f} s"
        raise NoResult(f"--probe  no trial of {spec.workload} could be timed: {next(iter(failed.values()), nothing)}")
    took_s = time.monotonic() - started
    slowest = max(known.values())
    seconds_by_kind = {**{id(kind): slowest for kind in kinds}, **dict.fromkeys(failed, 0.0), **known}
    found = estimate(
        spec,
        kinds,
        lambda kind: seconds_by_kind[id(kind)],
        (1.0, 1.0),
        max(timing.peak_bytes for timing in timings),
        f"from the first steps of {len(known)} of {len(kinds)} kinds of trial, one at a time, in {took_s:.0f} s",
    )
    return found, [*_without_figure(kinds, failed, known), *_remarks(spec, timings)]


def timings_of(spec: SweepSpec, workload: Description, kinds: Sequence[Kind], budget_s: float) -> list[Timing]:
    """How far one trial of each kind comes. The last ones are missing when the time was over, or their process died
    before; the one with which it died says how.
    """
    share_s = min(MAX_SHARE_S, max(MIN_SHARE_S, budget_s / max(len(kinds), 1)))
    with tempfile.TemporaryDirectory(prefix="orch-probe-") as folder:
        jobs = [asdict(_job(spec, workload, number, kind, folder)) for number, kind in enumerate(kinds)]
        question = {"jobs": jobs, "share_s": share_s, "budget_s": budget_s}
        threads = str(max(1, int(spec.resources.cpu)))
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env={**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",  # what a workload prints may be anything
        )
        try:
            out, err = process.communicate(json.dumps(question), timeout=budget_s + GRACE_S)
            exit_code = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            exit_code = 0  # it was we who ended it
        finally:
            process.kill()
    timings = [Timing(**json.loads(line)) for line in out.splitlines() if line.endswith("}")]
    if exit_code and len(timings) < len(kinds):
        said = err.strip().rpartition("\n")[2]
        error = f"its process died, {ending_in_words(exit_code)}{said and f': {said}'}"
        timings.append(Timing(False, 0.0, [], 0, [], error))
    return timings


def _job(spec: SweepSpec, workload: Description, number: int, kind: Kind, folder: str) -> Job:
    return Job(
        sweep_id=0,
        trial_id=0,
        number=number,
        attempt=1,
        run_id="",
        workload=workload.address,
        params=kind.params,
        metric=spec.metric.name,
        stop_diverged=spec.stop_diverged,
        log_every=spec.log_every,
        checkpoint_every=sys.maxsize,
        started_at_ms=0,
        artifact_uri=os.path.join(folder, str(number), "artifacts"),
        device="cuda" if spec.resources.gpu else "cpu",
        thresholds=spec.thresholds,
    )


def _without_figure(kinds: Sequence[Kind], failed: Mapping[int, str], known: Mapping[int, float]) -> Iterator[str]:
    """Which kinds of trial the estimate leaves out, and which it guesses."""
    if failed:
        named = _named([kind for kind in kinds if id(kind) in failed])
        why = next(iter(failed.values())).splitlines()[0]
        yield f"not counted, as the first steps failed: {named} ({why})"
    if late := [kind for kind in kinds if id(kind) not in {**failed, **known}]:
        yield f"without a figure, counted as the slowest of the others: {_named(late)}"


def _named(kinds: Sequence[Kind]) -> str:
    more = f" and {len(kinds) - MANY} more" if len(kinds) > MANY else ""
    return "; ".join(map(str, kinds[:MANY])) + more


def _remarks(spec: SweepSpec, timings: Sequence[Timing]) -> Iterator[str]:
    """What the reports say about the sweep's own words: a metric that no report of a whole trial had."""
    wanted = {f"metric {one.name}": one.name for one in spec.objectives}
    if spec.unstable:
        wanted[f"metric {spec.unstable.metric} of unstable"] = spec.unstable.metric
    whole = [timing for timing in timings if timing.ended]
    for words, name in wanted.items():
        if whole and not any(name in timing.keys for timing in whole):
            yield f"{words}: not among what {len(whole)} whole trials reported: {', '.join(sorted(whole[0].keys))}"


# The process that trains


@dataclass
class _Deadline:
    """A sink that keeps nothing, and says `stopping` when the time is over."""

    ends_at: float

    @property
    def stopping(self) -> bool:
        return time.monotonic() > self.ends_at

    def record(self, job: Job, step: int, timestamp_ms: int, metrics: Mapping[str, float]) -> None: ...

    def finding(self, job: Job, finding: Finding) -> None: ...

    def decision(self, job: Job, decision: Decision) -> None: ...

    def sync(self) -> None: ...


def main() -> None:
    """Reads the jobs from standard input; writes a line of JSON for each that was begun in time."""
    question = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a workload prints must not get between the lines
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    deadline = time.monotonic() + question["budget_s"]
    for values in question["jobs"]:
        if time.monotonic() > deadline:
            return
        print(json.dumps(asdict(_timed(Job(**values), question["share_s"], deadline))), file=answers, flush=True)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _timed(job: Job, share_s: float, deadline: float) -> Timing:
    """Never raises for what the workload does."""
    reports: list[tuple[int, float]] = []
    keys: set[str] = set()
    started, ended, error = time.monotonic(), False, ""
    try:
        workload = describe(job.workload)
        config, implementation = workload.resolve(job.params), workload.load()
        started = time.monotonic()  # what the first trial of a process imports is not its cost
        sink = _Deadline(min(deadline, started + share_s))
        ended = _train(implementation.run(config, _context(job, config, sink)), sink, started, reports, keys)
    except (Exception, SystemExit) as problem:  # the boundary between the user's code and ours
        error = f"{type(problem).__name__}: {problem}"
    seconds = time.monotonic() - started
    return Timing(ended, seconds, reports, _peak_resident_bytes(), sorted(keys), error)


def _peak_resident_bytes() -> int:
    """Of this process; not by getrusage, which on Linux may count the memory of the process that started it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _train(run: Any, sink: _Deadline, started: float, reports: list[tuple[int, float]], keys: set[str]) -> bool:
    """True if it came to its end in time."""
    try:
        for report in run:
            reports.append((int(report.step), time.monotonic() - started))
            keys.update(report.metrics)
            if sink.stopping:
                return False
    finally:
        close = getattr(run, "close", None)
        if close is not None:
            close()
    return not sink.stopping


def _context(job: Job, config: Any, sink: _Deadline) -> Any:
    from orchestrator.execution.trial_run import TrialContext
    from orchestrator.execution.verdict import Verdict

    return TrialContext(job, sink, config, Verdict(job))


if __name__ == "__main__":
    main()
