"""Failures that are the memory's, that all trials share, or that end a sweep before its time: on real workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.execution.ray_tune.driver import _outcome_of_dead_worker
from orchestrator.trial import Failure
from tests.conftest import Done, Orch
from tests.unit.test_failures import job

Hungry = tuple[Done, list[dict[str, Any]]]

BESIDE_S = 0.5  # a trial's length: long enough for two workers to train side by side


@pytest.fixture(scope="module")
def hungry(ray_orch: Orch) -> Hungry:
    """A sweep of which one trial runs out of memory once and one always; what it said, and its trials."""
    text = f"""
        workload: orch_lab:Hungry
        metric: {{name: ended, mode: max}}
        params: {{times: {{grid: [1, 9, 0]}}, sleep_s: {BESIDE_S}}}
        seeds: 2
        exclude: [{{times: [1, 9], seed: 1}}]
    """
    done = ray_orch("sweep", ray_orch.sweep_file(text, "hungry"), expect=1)
    trials = ray_orch.rows("select * from sweep_hungry order by trial")
    runs = ray_orch.rows("select attempts, reason, error from runs where sweep = 'hungry' order by trial")
    return done, [{**trial, **run} for trial, run in zip(trials, runs, strict=True)]


def test_a_trial_without_memory_trains_again_alone_in_a_fresh_process_beyond_retries(hungry: Hungry) -> None:
    _, trials = hungry
    again = trials[0]
    assert (again["state"], again["attempts"]) == ("finished", 2)
    others = [trial for trial in trials if trial["state"] == "finished" and trial is not again]
    assert len(others) == 2
    assert all(trial["ended"] <= again["began"] for trial in others)  # after the others, and beside none
    assert again["pid"] not in {trial["pid"] for trial in others}


def test_one_that_has_no_room_even_alone_fails_and_says_what_needs_less(hungry: Hungry) -> None:
    done, trials = hungry
    assert (trials[1]["state"], trials[1]["attempts"]) == ("failed", 2)
    assert trials[1]["reason"].startswith("out of memory, also with no other trial beside it; try a smaller batch_size")
    assert "MemoryError" in trials[1]["error"]
    assert "trying again alone" in done.out


@pytest.mark.parametrize(
    ("words", "failure"),
    [
        ("1 worker(s) were killed due to the node running low on memory. Memory on the", Failure.OUT_OF_MEMORY),
        ("The actor died unexpectedly. Worker exit type: NODE_OUT_OF_MEMORY Worker exit", Failure.OUT_OF_MEMORY),
        ("The actor died unexpectedly. Worker exit type: SYSTEM_ERROR Worker exit detail", Failure.WORKER_DEATH),
        ("The actor died because of an error raised in its creation task,\nKeyError: 'x'", Failure.WORKER_START),
    ],
)
def test_rays_words_say_of_what_a_worker_died(words: str, failure: Failure) -> None:
    """As Ray 2.60 said them when it was made to."""
    assert _outcome_of_dead_worker(job(), 1.0, f"Failure # 1 (occurred at 2026)\n{words}").failure is failure


def test_one_error_all_over_stops_the_sweep_and_what_was_not_started_waits(
    orch: Orch, name: str, tmp_path: Path
) -> None:
    text = f"""
        workload: orch_lab:Odd
        metric: val/loss
        params: {{do: need_file, file: {tmp_path / "data"}}}
        seeds: 6
        stop: {{same_error: 3}}
    """
    file = orch.sweep_file(text, name)
    done = orch("sweep", file, "--inline", expect=1)
    assert f"{name}: 0/6 finished (3 failed, 3 waiting)" in done.out
    assert done.out.count("stopped: 3 trials in a row failed alike; 3 more were not started") == 1
    assert "the error         FileNotFoundError: <path> (in orch_lab.py, _odd)" in done.out
    assert f"first in          trial 0; its traceback: orch logs {name} --trial 0" in done.out
    assert f"orch resume {name} --failed" in done.out
    assert f"sweep {name} is failed already: there is nothing to cancel" in orch("cancel", name).out
    (tmp_path / "data").touch()
    assert f"{name}: 3/6 finished (3 failed)" in orch("sweep", file, "--inline", "--resume", expect=1).out
    assert f"{name}: 6/6 finished" in orch("resume", name, "--failed", "--inline").out


def test_a_sweep_that_is_stopped_for_one_error_saves_what_runs(ray_orch: Orch, name: str) -> None:
    text = """
        workload: orch_lab:Counter
        metric: train/loss
        params: {raise_at: {grid: [0, 3, 4, 5]}, steps: 3000, sleep_s: 0.02}
        log_every: 1
        stop: {same_error: 3}
    """
    done = ray_orch("sweep", ray_orch.sweep_file(text, name), expect=1)
    assert "stopped: 3 trials in a row failed alike" in done.out
    assert "RuntimeError: a planted failure at <n> in <path> (in orch_lab.py, run)" in done.out
    runs = ray_orch.rows(f"select state, last_step from runs where sweep = '{name}' order by trial")
    assert [run["state"] for run in runs] == ["killed", "failed", "failed", "failed"]
    assert 0 < runs[0]["last_step"] < 3000
    [attempt] = ray_orch.rows(f"select run_id from runs where sweep = '{name}' and trial = 0")
    saved = [path.name for path in _states(ray_orch, attempt["run_id"])]
    assert any(str(runs[0]["last_step"]) in one for one in saved), saved


def _states(orch: Orch, run_id: str) -> list[Path]:
    """The saved states of a run, in the artifacts' folder."""
    return [
        path for path in Path(orch.env["ORCH_HOME"], "artifacts").rglob("*") if run_id in path.parts and path.is_file()
    ]
