"""The benchmarks run and measure what they say; their ratios are judged by `make bench`, never here."""

from __future__ import annotations

import importlib

import psycopg

from benchmarks import startup
from benchmarks.__main__ import NAMES
from benchmarks.bulk_writes import TARGETS, compare


def test_every_benchmark_of_make_bench_can_be_loaded() -> None:
    assert all(callable(importlib.import_module(f"benchmarks.{name}").run) for name in NAMES)


def test_both_writers_of_the_bulk_benchmark_write_the_same_number_of_points(empty_database_url: str) -> None:
    results = compare(empty_database_url, num_repeats=1)
    assert set(results) == set(TARGETS)
    with psycopg.connect(empty_database_url) as connection:
        counts = connection.execute("select count(*) from metrics").fetchone()
    assert counts == (2 * (1000 + 64 * 16),)


def test_the_startup_benchmark_runs_both_commands() -> None:
    assert startup.seconds([*startup.ORCH, "--help"]) > 0
    assert startup.seconds([*startup.ORCH, "plan", "sweeps/zloss.yaml"]) > 0
