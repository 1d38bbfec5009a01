"""The benchmarks run and measure what they say; their ratios are judged by `make bench`, never here."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

import psycopg
import pytest

from benchmarks import char_gpt, load, moe_layer, preflight, startup
from benchmarks.__main__ import NAMES
from benchmarks.bulk_writes import TARGETS, compare
from orchestrator.settings import Home
from orchestrator.tracking.recorder import Recorder, connect_by_url


def test_every_benchmark_of_make_bench_can_be_loaded() -> None:
    assert all(callable(importlib.import_module(f"benchmarks.{name}").run) for name in NAMES)


def test_both_writers_of_the_bulk_benchmark_write_the_same_number_of_points(empty_database_url: str) -> None:
    results = compare(empty_database_url, num_repeats=1)
    assert set(results) == set(TARGETS)
    with psycopg.connect(empty_database_url) as connection:
        counts = connection.execute("select count(*) from metrics").fetchone()
    assert counts == (2 * (1000 + 64 * 16),)


def test_the_preflight_benchmark_takes_the_sweeps_that_are_checked_before_they_train() -> None:
    names = {path.stem for path in preflight.checked_sweeps()}
    assert {"zloss", "five_knobs", "precision", "depth_training", "stability"} <= names
    assert names.isdisjoint({"silent_bugs", "bug_sgd", "rounding"})  # bugs are the question; nothing to check


def test_the_startup_benchmark_runs_both_commands() -> None:
    assert startup.seconds([*startup.ORCH, "--help"]) > 0
    assert startup.seconds([*startup.ORCH, "plan", "sweeps/zloss.yaml"]) > 0


def test_without_its_peer_the_moe_benchmark_says_that_it_did_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_layer, "find_spec", lambda name: None)
    ((label, *_, met),) = moe_layer.run()
    assert label.startswith("NOT RUN")
    assert met is None


def test_the_moe_benchmark_times_our_layer_and_its_peers() -> None:
    pytest.importorskip("transformers")
    assert set(moe_layer.compare(num_experts=4, k=1, num_rounds=1, num_tokens=16)) == {"ours", "Mixtral", "Switch"}
    assert all(seconds > 0 for seconds in moe_layer.compare(4, k=2, num_rounds=1, num_tokens=16).values())


def test_the_plain_loop_trains_as_many_parameters_as_char_gpt_and_both_are_timed() -> None:
    ours = char_gpt.begin().model
    plain = char_gpt.PlainGpt(char_gpt.CONFIG, num_symbols=ours.shape.vocabulary)
    assert sum(p.numel() for p in plain.parameters()) == sum(p.numel() for p in ours.parameters())
    assert all(value > 0 for _, value, *_ in char_gpt.run(num_turns=1))


def test_64_reporters_of_the_load_benchmark_lose_no_point(empty_database_url: str, home: Home, tmp_path: Path) -> None:
    run_ids = load.new_runs(empty_database_url, load.NUM_REPORTERS)
    recorder = Recorder(functools.partial(connect_by_url, empty_database_url), tmp_path)
    burst = load.Burst(**load.burst(recorder, home, run_ids, first_step=1, num_reports=load.REPORTS_PER_S))
    assert recorder.close(60).is_empty
    with psycopg.connect(empty_database_url) as connection:
        counts = connection.execute("select count(*), count(distinct run_uuid) from metrics").fetchone()
    assert counts == (burst.num_points, 64)
    assert burst.num_points == 64 * 200
    assert min(burst.recorder_s, burst.postgres_s) > 0


def test_the_load_benchmark_holds_each_burst_against_the_calm_before_it() -> None:
    bursts = [load.Burst(began, began + 10, 1, 1, 1, lag_s=0) for began in (10.0, 30.0)]
    steps = [load.Step(float(at), 2.0 if at % 20 >= 10 else 1.0, 1.0) for at in range(40)]
    assert load.slowdown_of(bursts, steps, "wall_s") == 2
    assert load.slowdown_of(bursts, steps, "cpu_s") == 1
