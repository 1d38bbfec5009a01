"""The database goes away: before a sweep, in the middle of one, or under a server that keeps few connections."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from tests.conftest import Orch
from tests.faults.conftest import FragileServer, num_points, wait_until

SLOW = """
    workload: orch_lab:Trivial
    metric: {name: val/loss, mode: min}
    params:
      x: {grid: [0, 1, 2]}
      steps: 30
      sleep_s: 0.1
    log_every: 1
    resources: {cpu: 0.5, max_concurrent: 2}
"""
POINTS = "select count(*) as n, count(distinct (run_id, key, step)) as d from metrics where sweep = '%s'"


def test_a_sweep_outlives_its_database_keeps_its_name_and_every_point_arrives_once(
    fragile: FragileServer, ray_orch: Orch, name: str
) -> None:
    orch = Orch({**ray_orch.env, **fragile.orch.env}, fragile.orch.folder)
    file = orch.sweep_file(SLOW, name)
    process = orch.start("sweep", file)
    wait_until(lambda: num_points(orch.env["ORCH_DATABASE_URL"], name) > 20)
    fragile.stop()
    time.sleep(4)  # longer than a trial has left: one ends while nobody can be told
    fragile.start()
    assert process.stdout is not None
    before = []
    for line in process.stdout:
        before.append(line)
        if "the database is back" in line:
            break
    assert "this sweep is being run by" in orch("sweep", file, "--inline", "--resume", expect=2).err
    rest, _ = process.communicate(timeout=120)
    output = "".join(before) + rest
    assert process.returncode == 0, output
    assert f"{name}: 3/3 finished" in output
    assert "training goes on" in output
    assert "Traceback" not in output
    assert orch.rows(POINTS % name) == [{"n": 3 * 30 * 5, "d": 3 * 30 * 5}]
    assert orch.rows(f"select distinct attempts from runs where sweep = '{name}'") == [{"attempts": 1}]
    statuses = "select string_agg(distinct status, ',') from public.runs"
    assert fragile.value(statuses + " where name like %s", f"{name}-%") == "FINISHED"


def test_a_sweep_does_not_start_while_the_database_is_away(fragile: FragileServer, name: str) -> None:
    fragile.stop()
    try:
        refused = fragile.orch("sweep", fragile.orch.sweep_file(SLOW, name), "--inline", expect=2)
    finally:
        fragile.start()
    assert "cannot connect" in refused.err
    assert refused.err.count("\n") == 1
    assert fragile.orch.rows(f"select count(*) as n from sweeps where sweep = '{name}'") == [{"n": 0}]


def test_stopping_the_embedded_server_in_mid_sweep_is_an_outage_that_the_next_command_ends(
    orch: Orch, tmp_path: Path, name: str
) -> None:
    apart = Orch({**orch.env, "ORCH_HOME": str(tmp_path / ".orch")}, tmp_path)
    process = apart.start("sweep", apart.sweep_file(SLOW, name), "--inline")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("1/3"):
            break
    try:
        assert "is stopped" in apart("down").out
        time.sleep(1)
        apart("status")
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        assert f"{name}: 3/3 finished" in output
        assert apart.rows(POINTS % name) == [{"n": 3 * 30 * 5, "d": 3 * 30 * 5}]
    finally:
        process.kill()
        apart("down")


def test_sixteen_workers_and_fifty_parameters_need_few_connections(
    fragile: FragileServer, ray_orch: Orch, name: str
) -> None:
    orch = Orch({**ray_orch.env, **fragile.orch.env}, fragile.orch.folder)
    text = """
        workload: orch_lab:Wide
        metric: loss
        params: {a00: {grid: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]}}
        seeds: 2
        resources: {cpu: 0.1, max_concurrent: 16}
    """
    seen = []
    done = threading.Event()

    def sample() -> None:
        clients = "backend_type = 'client backend' and pid <> pg_backend_pid()"
        while not done.wait(0.1):
            seen.append(fragile.value(f"select count(*) from pg_stat_activity where {clients}"))

    watcher = threading.Thread(target=sample)
    watcher.start()
    try:
        orch("sweep", orch.sweep_file(text, name), timeout_s=300)
    finally:
        done.set()
        watcher.join()
    assert len(seen) > 10
    assert max(seen) <= 10
    assert (
        fragile.value("select count(*) from public.runs where name like %s and status = 'FINISHED'", f"{name}-%") == 32
    )
    assert orch.rows(f'select count(distinct a00) as n, max("a48") as last from sweep_{name}') == [
        {"n": 16, "last": 48}
    ]
