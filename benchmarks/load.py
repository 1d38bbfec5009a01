"""What recording costs a training beside it: 64 reporters x 200 points a second into one recorder, none lost.

Training (char_gpt's loop) is pinned on one core, the recorder with its PostgreSQL on another. Bursts of load and calm
take turns; compared are medians of the training's steps. The reporters are threads of the recorder's process: their
own work counts as its cost. Needs two cores; the machine should do nothing else.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from orchestrator import ledger
from orchestrator.database import embedded
from orchestrator.settings import Home
from orchestrator.tracking import mlflow_schema  # before MLflow: it sets MLflow's switches
from orchestrator.tracking.recorder import Points, Recorder, connect_by_url

Line = tuple[str, float, str, str, bool | None]

NUM_REPORTERS = 64
POINTS_PER_REPORT = 10
REPORTS_PER_S = 20  # of one reporter: 200 points a second
BURST_S, NUM_BURSTS = 5.0, 12  # a minute of load
MAX_SLOWDOWN_PERCENT = 5.0
DRAIN_TIMEOUT_S = 120.0
WARM_UP_S = 3.0


@dataclass(frozen=True)
class Burst:
    """What happened in a burst of load."""

    began: float  # time.monotonic, the same clock in all processes of a machine
    ended: float
    num_points: int
    recorder_s: float  # of CPU, until everything was in the database
    postgres_s: float
    lag_s: float  # from the last report until everything was in the database

    @property
    def wall_s(self) -> float:
        return self.ended - self.began + self.lag_s


@dataclass(frozen=True)
class Step:
    """One step of the training."""

    at: float
    wall_s: float
    cpu_s: float


def run(burst_s: float = BURST_S, num_bursts: int = NUM_BURSTS) -> Iterator[Line]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        yield "NOT RUN: training and recorder need a core each", float(len(cores)), "cores", ">= 2", None
        return
    with tempfile.TemporaryDirectory(prefix="orch-bench-") as folder:
        home = Home(Path(folder) / ".orch").ensure()
        try:
            bursts, steps, num_stored = measure(home, cores, burst_s, num_bursts)
        finally:
            embedded.stop(home)
    yield from report(bursts, steps, num_stored)


def report(bursts: Sequence[Burst], steps: Sequence[Step], num_stored: int) -> Iterator[Line]:
    given, wall_s = sum(burst.num_points for burst in bursts), sum(burst.wall_s for burst in bursts)
    loaded_s = sum(burst.ended - burst.began for burst in bursts)
    asked = NUM_REPORTERS * POINTS_PER_REPORT * REPORTS_PER_S
    kept_up = given >= 0.98 * asked * loaded_s  # the reporters themselves start and stop within it
    yield "points a second", given / loaded_s, "points/s", f">= {0.98 * asked:g}", kept_up
    yield "points given", given, "points", "", None
    yield "points lost", given - num_stored, "points", "0", given == num_stored
    slowdown = 100 * (slowdown_of(bursts, steps, "wall_s") - 1)
    target = f"<= {MAX_SLOWDOWN_PERCENT:g} %"
    yield "training slows by", slowdown, "%", target, slowdown <= MAX_SLOWDOWN_PERCENT
    yield "training slows by, in CPU time", 100 * (slowdown_of(bursts, steps, "cpu_s") - 1), "%", "", None
    yield "recorder with its reporters", sum(burst.recorder_s for burst in bursts) / wall_s, "cores", "", None
    yield "PostgreSQL", sum(burst.postgres_s for burst in bursts) / wall_s, "cores", "", None
    yield "longest wait for the last point", max(burst.lag_s for burst in bursts), "s", "", None


def slowdown_of(bursts: Sequence[Burst], steps: Sequence[Step], kind: str) -> float:
    """Median over the bursts of a burst's median step over that of the calm before it."""
    ratios: list[float] = []
    for before, burst in zip([None, *bursts], bursts, strict=False):
        calm_from = steps[0].at if before is None else before.ended + before.lag_s
        calm = [getattr(step, kind) for step in steps if calm_from <= step.at < burst.began]
        loaded = [getattr(step, kind) for step in steps if burst.began <= step.at < burst.ended]
        ratios.append(median(loaded) / median(calm))
    return median(ratios)


def measure(home: Home, cores: Sequence[int], burst_s: float, num_bursts: int) -> tuple[list[Burst], list[Step], int]:
    """Calm and burst in turns. Returns the bursts, the training's steps and how many points the database has."""
    url = embedded.ensure_running(home)
    pin_server(home, cores[1])
    times = home.path / "steps.jsonl"
    with _role("trainer", str(cores[0]), str(times)) as trainer:
        with _role("recorder", str(cores[1]), url, str(home.path / "journal"), str(home.path)) as recorder:
            for process in (trainer, recorder):
                _answer(process)  # it is warm
            bursts = []
            for _ in range(num_bursts):
                time.sleep(burst_s)
                bursts.append(Burst(**json.loads(_answer(recorder, f"{burst_s}\n"))))
            _end(recorder)
            assert trainer.poll() is None, f"the training ended by itself: {trainer.returncode}"
    lines = [line for line in times.read_text().splitlines(keepends=True) if line.endswith("\n")]
    with connect_by_url(url) as connection:
        row = connection.execute("select count(*) from public.metrics").fetchone()
    assert row is not None
    return bursts, [Step(*json.loads(line)) for line in lines], int(row[0])


@contextmanager
def _role(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """One of the two processes that are measured, ended afterwards."""
    command = [sys.executable, "-m", "benchmarks.load", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[1]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=root
    ) as process:
        try:
            yield process
        finally:
            process.kill()  # the trainer would train for ever


def _answer(process: subprocess.Popen[str], asked: str = "") -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(asked)
    process.stdin.flush()
    line = process.stdout.readline()
    assert line, f"it ended: {process.args!r}"  # its own words are on stderr
    return line


def _end(process: subprocess.Popen[str]) -> None:
    """Has it come to its own end, which must be a good one."""
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(DRAIN_TIMEOUT_S) == 0


def server_processes(home: Home) -> list[psutil.Process]:
    server = embedded.running(home)
    assert server is not None
    postmaster = psutil.Process(server.pid)
    return [postmaster, *postmaster.children(recursive=True)]


def pin_server(home: Home, core: int) -> None:
    """Children that come later inherit the postmaster's core."""
    for process in server_processes(home):
        with suppress(psutil.NoSuchProcess):  # a client's, which has just gone
            process.cpu_affinity([core])


def server_seconds(home: Home) -> float:
    """CPU time of the server so far, children that are gone included."""
    total: float = 0.0
    for process in server_processes(home):
        with suppress(psutil.NoSuchProcess):  # an autovacuum worker has just ended; the postmaster counts it
            times = process.cpu_times()
            total += sum((times.user, times.system, times.children_user, times.children_system))
    return total


# The two processes


def train(core: str, times: str) -> None:
    """Trains until it is ended, and notes every step."""
    os.sched_setaffinity(0, {int(core)})
    import torch

    from benchmarks.char_gpt import begin

    torch.set_num_threads(1)
    training = begin()
    warm_at = time.monotonic() + WARM_UP_S
    while time.monotonic() < warm_at:
        training.advance()
    print("warm", flush=True)
    with open(times, "w", buffering=1) as file:
        while True:
            began, cpu_began = time.monotonic(), time.process_time()
            training.advance()
            step = [began, time.monotonic() - began, time.process_time() - cpu_began]
            file.write(f"{json.dumps(step)}\n")


def record(core: str, url: str, journal: str, home_path: str) -> None:
    """Records a burst for each line on stdin, which says how many seconds it lasts."""
    os.sched_setaffinity(0, {int(core)})
    home, run_ids = Home(Path(home_path)), new_runs(url, NUM_REPORTERS)
    recorder = Recorder(functools.partial(connect_by_url, url), Path(journal))
    first_step = 1
    print("warm", flush=True)
    for line in sys.stdin:
        num_reports = round(float(line) * REPORTS_PER_S)
        print(json.dumps(burst(recorder, home, run_ids, first_step, num_reports)), flush=True)
        first_step += num_reports
    assert recorder.close(DRAIN_TIMEOUT_S).is_empty


def burst(
    recorder: Recorder, home: Home, run_ids: Sequence[str], first_step: int, num_reports: int
) -> dict[str, float]:
    apart_s = 1 / REPORTS_PER_S / len(run_ids)
    postgres_s, cpu_s, began = server_seconds(home), time.process_time(), time.monotonic()
    reporters = [
        threading.Thread(target=say, args=(recorder, run_id, first_step, num_reports, began + place * apart_s))
        for place, run_id in enumerate(run_ids)
    ]
    for reporter in reporters:
        reporter.start()
    for reporter in reporters:
        reporter.join()
    ended = time.monotonic()
    assert recorder.drain(DRAIN_TIMEOUT_S), recorder.database_error
    return {
        "began": began,
        "ended": ended,
        "num_points": len(run_ids) * num_reports * POINTS_PER_REPORT,
        "lag_s": time.monotonic() - ended,
        "recorder_s": time.process_time() - cpu_s,
        "postgres_s": server_seconds(home) - postgres_s,
    }


def say(recorder: Recorder, run_id: str, first_step: int, num_reports: int, at: float) -> None:
    """One reporter, on its own beat."""
    for step in range(first_step, first_step + num_reports):
        time.sleep(max(0.0, at - time.monotonic()))
        at += 1 / REPORTS_PER_S
        metrics = {f"metric/{key}": step / (key + 3) for key in range(POINTS_PER_REPORT)}
        recorder.record([Points(run_id, 1, 1, step, int(time.time() * 1000), metrics)])


def new_runs(url: str, count: int) -> list[str]:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    mlflow_schema.create(url)
    store: Any = SqlAlchemyStore(mlflow_schema.mlflow_uri(url), Path(tempfile.gettempdir()).as_uri())
    with store.engine.connect() as connection:
        ledger.upgrade(connection)  # a recorder asks it which attempts have been replaced
    experiment_id = store.create_experiment(f"load-{time.time_ns()}")
    now_ms = int(time.time() * 1000)
    run_ids = [str(store.create_run(experiment_id, "load", now_ms, [], "load").info.run_id) for _ in range(count)]
    store.engine.dispose()
    return run_ids


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    if name == "trainer":
        train(*arguments)
    else:
        record(*arguments)
