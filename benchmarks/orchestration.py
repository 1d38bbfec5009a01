"""What a trial costs beside its training: 24 trials that do nothing, 10 reports of 5 metrics each, everything logged.

Contenders, each in a process of its own with a Ray of its own that is up before the clock starts; worker start counts:
orch; bare Tune that returns one result a trial and logs nothing; `tune.Tuner` with the stock MLflowLoggerCallback as a
beginner writes it (function trainable, defaults); the same with `reuse_actors=True`. All log to the same PostgreSQL.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil

LAB = Path(__file__).parents[1] / "tests" / "lab"
TRIALS, REPORTS = 24, 10
ROUNDS = 3

Line = tuple[str, float, str, str, bool | None]


def run() -> Iterator[Line]:
    """Medians of interleaved rounds, in seconds a trial, and the ratios between them."""
    times: dict[str, list[float]] = {name: [] for name in ("orch", "bare", "reuse", "beginner")}
    with tempfile.TemporaryDirectory(prefix="orch-bench-") as home:
        for _ in range(ROUNDS):
            for name, measured in times.items():
                measured.append(_in_a_process(name, home) / TRIALS)
        _orch_down(home)
    orch, bare, reuse, beginner = (median(times[name]) for name in ("orch", "bare", "reuse", "beginner"))
    yield "bare Tune, one result a trial", bare, "s/trial", "", None
    yield "orch", orch, "s/trial", "<= 0.25", orch <= 0.25
    yield "orch above bare Tune", orch - bare, "s/trial", "<= 0.10", orch - bare <= 0.10
    yield "Tune + MLflowLoggerCallback / orch", beginner / orch, "x", ">= 6 x", beginner / orch >= 6
    yield "the same with reuse_actors=True / orch", reuse / orch, "x", ">= 2 x", reuse / orch >= 2


def _in_a_process(contender: str, home: str) -> float:
    command = [sys.executable, "-m", "benchmarks.orchestration", contender, home]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(LAB), str(LAB.parents[1])])}
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    return float(done.stdout.strip().split("\n")[-1])


def _orch_down(home: str) -> None:
    from orchestrator.workspace import stop_services

    stop_services(Path(home) / ".orch")


def time_orch(home: Path, steps: int = REPORTS, trials: int = TRIALS) -> float:
    """Seconds from the first row in the ledger to the last; Ray and the database are up."""
    from orchestrator.backends import Backend
    from orchestrator.bookends import open_run, settle, view_refresher
    from orchestrator.execution.ray_tune import environment
    from orchestrator.launch import create_sweep
    from orchestrator.ledger.store import Ledger
    from orchestrator.settings import artifact_root, journal_folder
    from orchestrator.spec import parse_sweep
    from orchestrator.workload import describe
    from orchestrator.workspace import open_workspace

    workspace = open_workspace(home)
    token_file = workspace.home.secret_file("ray_token")
    environment.prepare(token_file)
    from orchestrator.execution.ray_tune.cluster import local_cluster
    from orchestrator.execution.ray_tune.driver import run_on_ray
    from orchestrator.tracking.runs import Runs

    text = f"""
workload: orch_lab:Trivial
metric: val/loss
params: {{x: {{grid: [{", ".join(str(float(x)) for x in range(trials))}]}}, steps: {steps}}}
log_every: 1
"""
    spec = parse_sweep(text, f"b{uuid.uuid4().hex[:8]}.yaml", describe)
    workload = describe(spec.workload)
    with local_cluster(workspace.home.scratch(), token_file) as cluster:
        started = time.perf_counter()
        engine = workspace.database.engine("orch bench")
        ledger, runs = Ledger(engine), Runs(workspace.database.url, artifact_root(workspace.settings, workspace.home))
        sweep = create_sweep(ledger, runs, spec, workload)
        refresh = view_refresher(engine, sweep.name)
        run_ = open_run(ledger, runs, spec, workload, sweep, Silent(), Backend(2, "cpu", lambda feed: []), refresh)
        journal = str(journal_folder(workspace.settings, workspace.home))
        remainders = run_on_ray(
            run_, cluster, num_workers=2, cpu=1, gpu=0, database_url=workspace.database.url, journal_folder=journal
        )
        assert settle(ledger, sweep, run_, remainders) == 0
        seconds = time.perf_counter() - started
    rows = workspace.query("select count(*) from metrics where sweep = %s", (sweep.name,))[1]
    assert rows[0][0] == trials * steps * 5, f"{rows[0][0]} points arrived"
    return seconds


class Silent:
    """An observer that shows nothing."""

    def opened(self, *args: Any) -> None: ...

    def said(self, *args: Any) -> None: ...

    def started(self, *args: Any) -> None: ...

    def ended(self, *args: Any, **kwargs: Any) -> None: ...


def time_bare_tune(home: Path) -> float:
    import ray
    from ray import tune

    def nothing(config: dict[str, float]) -> dict[str, float]:
        return {"loss": config["x"]}

    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    config = tune.TuneConfig(reuse_actors=True, max_concurrent_trials=2)
    space = {"x": tune.grid_search([float(x) for x in range(TRIALS)])}
    started = time.perf_counter()
    results = tune.Tuner(nothing, param_space=space, tune_config=config, run_config=_silent_run(home)).fit()
    seconds = time.perf_counter() - started
    assert len(results) == TRIALS
    return seconds


def time_mlflow_callback(home: Path, reuse: bool) -> float:
    """As a beginner writes it: a function that reports, the stock callback, defaults."""
    from orchestrator.workspace import open_workspace

    uri = open_workspace(home).database.mlflow_uri
    import mlflow
    import ray
    from ray import tune
    from ray.air.integrations.mlflow import MLflowLoggerCallback

    def train(config: dict[str, float]) -> None:
        for step in range(1, REPORTS + 1):
            loss = (config["x"] - 1) ** 2 + 1 / step
            tune.report({"train/loss": loss, "val/loss": loss, "a": step, "b": -step, "c": math.sin(step)})

    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    experiment = f"peer-{uuid.uuid4().hex[:8]}"
    run_config = _silent_run(home)
    run_config.callbacks = [MLflowLoggerCallback(tracking_uri=uri, experiment_name=experiment)]
    space = {"x": tune.grid_search([float(x) for x in range(TRIALS)])}
    started = time.perf_counter()
    tuner = tune.Tuner(train, param_space=space, tune_config=tune.TuneConfig(reuse_actors=reuse), run_config=run_config)
    results = tuner.fit()
    seconds = time.perf_counter() - started
    assert len(results) == TRIALS
    client = mlflow.MlflowClient(tracking_uri=uri)
    logged = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    assert len(logged) == TRIALS
    return seconds


def _silent_run(home: Path) -> Any:
    from ray import tune

    return tune.RunConfig(verbose=0, storage_path=str(home / "peer"))


def driver_growth_bytes(home: Path) -> dict[str, float]:
    """Growth of this process' memory from a first short sweep to the end of one with 10,000 reports."""
    time_orch(home, steps=10, trials=1)
    before = psutil.Process().memory_info().rss
    time_orch(home, steps=10_000, trials=1)
    return {"bytes": psutil.Process().memory_info().rss - before}


def main(contender: str, home: str) -> None:
    folder = Path(home) / ".orch"
    if contender == "memory":
        print(json.dumps(driver_growth_bytes(folder)))
        return
    seconds = {
        "orch": lambda: time_orch(folder),
        "bare": lambda: time_bare_tune(Path(home)),
        "reuse": lambda: time_mlflow_callback(folder, reuse=True),
        "beginner": lambda: time_mlflow_callback(folder, reuse=False),
    }[contender]()
    print(f"\n{seconds}")


if __name__ == "__main__":
    main(*sys.argv[1:])
