"""Bulk writes against MLflow's stock SQL store: the same points, the same PostgreSQL, turn and turn about."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from orchestrator.database import embedded
from orchestrator.settings import Home
from orchestrator.tracking import mlflow_schema  # before MLflow: it sets MLflow's switches
from orchestrator.tracking.bulk import rows_of, write_rows
from orchestrator.tracking.drain import connect_by_url
from orchestrator.tracking.records import Points, checked

from mlflow.entities import Metric  # isort: skip
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore  # isort: skip

Line = tuple[str, float, str, str, bool | None]

NUM_REPEATS = 15
TARGETS = {"1000 points of one run, 10 keys": 3.0, "64 runs x 16 points": 6.0}


def reports(store: SqlAlchemyStore, experiment_id: str, num_runs: int, num_steps: int, num_keys: int) -> list[Points]:
    """What fresh runs would report: `num_steps` reports of `num_keys` values each."""
    now_ms = int(time.time() * 1000)
    points = []
    for _ in range(num_runs):
        run_id = store.create_run(experiment_id, "bench", now_ms, [], "bench").info.run_id
        for step in range(num_steps):
            metrics = {f"metric/{key}": step / (key + 3) for key in range(num_keys)}
            points.append(Points(run_id, 1, 1, step, now_ms + step, metrics))
    return points


def by_mlflow(store: SqlAlchemyStore, points: Sequence[Points]) -> None:
    """One `log_batch` a run, the best that the stock store offers."""
    batches: dict[str, list[Metric]] = {}
    for report in points:
        batch = batches.setdefault(report.run_id, [])
        batch.extend(Metric(key, value, report.timestamp_ms, report.step) for key, value in report.metrics.items())
    for run_id, metrics in batches.items():
        store.log_batch(run_id, metrics, [], [])


def by_us(connection: Any, points: Sequence[Points]) -> None:
    write_rows(connection, rows_of(map(checked, points)))


def timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def compare(url: str, num_repeats: int = NUM_REPEATS) -> dict[str, dict[str, float]]:
    """Median milliseconds of both, and their ratio, by case."""
    mlflow_schema.create(url)
    store = SqlAlchemyStore(mlflow_schema.mlflow_uri(url), Path(tempfile.gettempdir()).as_uri())
    experiment_id = store.create_experiment(f"bulk-{time.time_ns()}")
    cases = {"1000 points of one run, 10 keys": (1, 100, 10), "64 runs x 16 points": (64, 4, 4)}
    results = {}
    with connect_by_url(url) as connection:
        for name, shape in cases.items():
            stock_s, ours_s = [], []
            for _ in range(num_repeats):
                first, second = (reports(store, experiment_id, *shape) for _ in range(2))
                stock_s.append(timed(lambda points=first: by_mlflow(store, points)))  # type: ignore[misc]
                ours_s.append(timed(lambda points=second: by_us(connection, points)))  # type: ignore[misc]
            stock_ms, ours_ms = 1000 * median(stock_s), 1000 * median(ours_s)
            results[name] = {"stock_ms": stock_ms, "ours_ms": ours_ms, "ratio": stock_ms / ours_ms}
    store.engine.dispose()
    return results


def run() -> Iterator[Line]:
    """The comparison on an embedded server of its own, which is stopped again."""
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder) / ".orch").ensure()
        try:
            results = compare(embedded.ensure_running(home))
        finally:
            embedded.stop(home)
    for name, result in results.items():
        yield f"orch, {name}", result["ours_ms"], "ms", "", None
        ratio, target = result["ratio"], TARGETS[name]
        yield f"MLflow's store / orch, {name}", ratio, "x", f">= {target:g} x", ratio >= target
