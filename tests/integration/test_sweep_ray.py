"""Sweeps on real Ray workers: warm processes, deaths, time limits, signals, fractional GPUs."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import time
from typing import Any

import psutil
import pytest

from tests.conftest import Done, Orch
from tests.faults.conftest import num_points, wait_until

WITNESS = """
    workload: orch_lab:Witness
    metric: {name: ended, mode: max}
    params: {sleep_s: %s}
    seeds: %d
"""


def columns_of(orch: Orch, name: str) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = orch.rows(f"select * from sweep_{name} order by trial")
    return rows


@pytest.fixture(scope="module")
def ten(ray_orch: Orch) -> tuple[str, Done]:
    """The name of a sweep of ten trials, and what it said to a machine."""
    name = f"ten{secrets.token_hex(5)}"
    return name, ray_orch("sweep", ray_orch.sweep_file(WITNESS % ("0.1", 10), name), "--json")


def test_two_warm_workers_train_all_trials(ray_orch: Orch, ten: tuple[str, Done]) -> None:
    rows = columns_of(ray_orch, ten[0])
    assert [row["state"] for row in rows] == ["finished"] * 10
    assert len({row["pid"] for row in rows}) == 2
    assert {row["threads"] for row in rows} == {1.0}
    assert {row["niceness"] for row in rows} == {1.0}
    assert {row["torch_imported"] for row in rows} == {0.0}  # nothing of ours brings torch to a workload without it
    assert {row["num_gpus"] for row in rows} == {0.0}  # no share, no device


def test_json_lines_tell_a_machine_everything(ten: tuple[str, Done]) -> None:
    name, done = ten
    events = [json.loads(line) for line in done.out.strip().split("\n")]
    assert [event["event"] for event in events].count("ended") == 10
    assert events[0] == {"event": "sweep", "sweep": name, "trials": 10, "done": 0, "workers": 2}
    assert events[-1]["event"] == "end"
    assert events[-1]["exit_code"] == 0
    assert events[-1]["counts"] == {"finished": 10}


@pytest.mark.slow
def test_a_local_ray_lives_for_the_sweep_only(orch: Orch, name: str) -> None:
    process = orch.start("sweep", orch.sweep_file(WITNESS % ("0.3", 4), name))
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert f"{name}: 4/4 finished" in output
    left = subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True, text=True).stdout
    assert left == ""


@pytest.fixture(scope="module")
def odd(ray_orch: Orch) -> list[dict[str, Any]]:
    """The trials of a sweep: one hangs and lets no other thread run; one does nothing odd, one reports numpy's
    integers, one dies.
    """
    name = f"odd{secrets.token_hex(5)}"
    text = """
        workload: orch_lab:Odd
        metric: val/loss
        params: {do: {grid: [seize, nothing, numpy_step, die]}}
        log_every: 1
        resources: {trial_time: 2s}
    """
    done = ray_orch("sweep", ray_orch.sweep_file(text, name), expect=1)
    assert f"{name}: 2/4 finished (2 failed)" in done.out
    return ray_orch.rows(f"select state, reason, last_step from runs where sweep = '{name}' order by trial")


def test_a_trial_past_its_time_fails_at_its_next_report_or_with_its_worker(odd: list[dict[str, Any]]) -> None:
    assert odd[0]["state"] == "failed"
    assert odd[0]["reason"] == "no report within trial_time = 2 s; its worker was ended"
    assert odd[1]["state"] == "finished"


def test_steps_may_be_numpy_integers(odd: list[dict[str, Any]]) -> None:
    assert odd[2] == {"state": "finished", "reason": "", "last_step": 4}


def test_a_dead_worker_without_retries_is_a_failed_trial_that_says_so(odd: list[dict[str, Any]]) -> None:
    assert odd[3]["state"] == "failed"
    assert odd[3]["reason"] == "the worker process died (killed, or a crash)"


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_stops_marks_and_says_how_to_go_on(orch: Orch, name: str) -> None:
    file = orch.sweep_file(WITNESS % ("1.0", 6), name)
    process = orch.start("sweep", file, "--max-concurrent", "2")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("1/6"):
            break
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does: the whole group gets it
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert f"orch sweep {file} --max-concurrent 2 --resume" in output
    states = {row["state"] for row in orch.rows(f"select distinct state from runs where sweep = '{name}'")}
    assert "running" not in states
    assert "waiting" in states
    done = orch("sweep", file, "--resume", "--inline")
    assert f"{name}: 6/6 finished" in done.out
    runs = orch.rows(f"select count(*) as n, count(distinct run_id) as d from runs where sweep = '{name}'")
    assert runs == [{"n": 6, "d": 6}]


def test_gpu_shares_never_span_two_devices(ray_orch: Orch, name: str) -> None:
    text = WITNESS % ("1.5", 6) + "    resources: {cpu: 0.1, gpu: 0.4}\n"
    ray_orch("sweep", ray_orch.sweep_file(text, name), timeout_s=300)
    rows = columns_of(ray_orch, name)
    assert {row["num_gpus"] for row in rows} == {1.0}
    assert {row["gpu"] for row in rows} == {0.0, 1.0}
    moments = sorted(row["began"] for row in rows)
    together = [[row for row in rows if row["began"] <= moment < row["ended"]] for moment in moments]
    assert max(map(len, together)) <= 4
    assert max(sum(row["gpu"] == device for row in group) for group in together for device in (0.0, 1.0)) <= 2


def test_more_than_the_cluster_has_is_refused_within_seconds(ray_orch: Orch, name: str) -> None:
    started = time.monotonic()
    for resources, words in (("{gpu: 3}", "needs 3 GPU, have 2"), ("{cpu: 8}", "needs 8 CPUs")):
        text = WITNESS % ("0.1", 1) + f"    resources: {resources}\n"
        assert words in ray_orch("sweep", ray_orch.sweep_file(text, name), expect=2).err
    assert time.monotonic() - started < 40
    assert ray_orch.rows(f"select count(*) as n from sweeps where sweep = '{name}'") == [{"n": 0}]


@pytest.mark.parametrize(
    ("module", "owner", "attribute"),
    [
        ("ray.tune.execution.tune_controller", "TuneController", "_maybe_reuse_cached_actor"),
        ("ray.tune.utils.object_cache", "_ObjectCache", "increase_max"),
        ("ray._private", "accelerators", "get_accelerator_manager_for_resource"),
        ("ray._private", "utils", "get_num_cpus"),
        ("ray._private", "state", "actors"),
    ],
)
def test_the_private_names_of_ray_that_we_touch_are_still_there(module: str, owner: str, attribute: str) -> None:
    import importlib

    assert hasattr(getattr(importlib.import_module(module), owner), attribute)


@pytest.mark.slow
def test_a_killed_recorder_comes_back_and_no_point_is_lost(ray_orch: Orch, name: str, server_url: str) -> None:
    text = """
        workload: orch_lab:Trivial
        metric: val/loss
        params: {steps: 40, sleep_s: 0.1}
        seeds: 2
        log_every: 1
    """
    ray_orch("status")  # the tables, which this test looks into at once
    process = ray_orch.start("sweep", ray_orch.sweep_file(text, name))
    wait_until(lambda: num_points(server_url, name) > 50)
    ours = [one for one in psutil.process_iter(["cmdline"]) if _is_recorder_of(one, ray_orch)]
    assert ours
    for one in ours:
        one.kill()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    rows = ray_orch.rows(f"select count(distinct (run_id, step)) as n from metrics where sweep = '{name}'")
    assert rows[0]["n"] == 2 * 40  # what had not reached its disk is told to its next life


def _is_recorder_of(process: psutil.Process, orch: Orch) -> bool:
    if "RecorderActor" not in " ".join(process.info["cmdline"] or []):
        return False
    return process.environ().get("RAY_AUTH_TOKEN_PATH") == orch.env["RAY_AUTH_TOKEN_PATH"]
