"""Deaths without a last word: a killed command, a deleted experiment, a deleted folder, a disk that fills up."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from orchestrator.database import embedded
from orchestrator.database.connection import Database
from orchestrator.database.keeper import displaced_servers, wait_for
from orchestrator.settings import Home
from tests.conftest import Orch
from tests.faults.conftest import num_points, value_of, wait_until

SLOW = """
    workload: orch_lab:Trivial
    metric: {name: val/loss, mode: min}
    params:
      x: {grid: [0, 1]}
      steps: 25
      sleep_s: 0.1
    log_every: 1
    resources: {max_concurrent: 2}
"""


def test_a_killed_command_is_resumed_without_doubled_runs_and_its_workers_write_no_more(
    orch: Orch, prepared_url: str, name: str
) -> None:
    file = orch.sweep_file(SLOW, name)
    process = orch.start_warm("sweep", file)
    wait_until(lambda: num_points(prepared_url, name) > 50)
    family = psutil.Process(process.pid).children(recursive=True)
    writers = [one for one in family if one.name().startswith(("ray::Resource", "ray::Recorder"))]
    assert len(writers) == 3  # two train, one records
    process.kill()
    process.wait()
    assert wait_for(lambda: not any(map(_lives, writers)), 20), "they would go on writing"
    left_behind = orch.rows(f"select state, reason from runs where sweep = '{name}'")
    assert {row["state"] for row in left_behind} == {"lost"}
    assert all(f"its command {process.pid}@" in row["reason"] for row in left_behind)
    statuses = "select string_agg(status, ',') from public.runs where name like %s"
    assert value_of(prepared_url, statuses, f"{name}-%") == "KILLED,KILLED"
    done = orch("sweep", file, "--resume", "--inline")
    assert f"{name}: 2/2 finished" in done.out
    assert value_of(prepared_url, statuses, f"{name}-%") == "FINISHED,FINISHED"
    rows = orch.rows(f"select attempts, state from runs where sweep = '{name}'")
    assert rows == [{"attempts": 2, "state": "finished"}] * 2
    points = "select count(*) as n, count(distinct step) as d, min(attempt) as a from metrics"
    points += f" where sweep = '{name}' and key = 'val/loss' group by run_id"
    assert orch.rows(points) == [{"n": 25, "d": 25, "a": 2}] * 2
    for agent in filter(_lives, family):  # two helpers of Ray's stay for minutes and write nothing
        agent.kill()


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_an_experiment_deleted_in_mid_sweep_costs_the_record_and_not_the_points(
    orch: Orch, prepared_url: str, name: str, home: Home
) -> None:
    process = orch.start_warm("sweep", orch.sweep_file(SLOW, name), "--inline")
    wait_until(lambda: num_points(prepared_url, name) > 50)
    run_ids = value_of(
        prepared_url, "select string_agg(run_uuid, ' ') from public.runs where name like %s", f"{name}-%"
    )
    value_of(prepared_url, "update public.experiments set lifecycle_stage = 'deleted' where name = %s", name)
    value_of(prepared_url, "update public.runs set lifecycle_stage = 'deleted' where name like %s", f"{name}-%")
    started = time.monotonic()
    output, _ = process.communicate(timeout=100)
    assert time.monotonic() - started < 60
    assert process.returncode == 1, output
    assert "trials without a record in MLflow: 0" in output
    assert "Traceback" not in output
    kept = "".join(path.read_text() for path in (home.path / "journal").rglob("*.journal"))
    assert any(run_id in kept for run_id in run_ids.split())


IMPATIENT = "from orchestrator.tracking import recorder; recorder.DISK_PATIENCE_S = 1.0"


def test_a_journal_that_fills_the_disk_ends_the_sweep_with_its_place_and_leaves_nothing_running(
    orch: Orch, name: str, tmp_path: Path
) -> None:
    if os.geteuid() != 0 or os.system(f"mount -t tmpfs -o size=2m none {tmp_path}") != 0:
        pytest.skip("needs the right to mount a small file system")
    brief = SLOW.replace("sleep_s: 0.1", "sleep_s: 0.04")  # two trials of a second; the disk is full in milliseconds
    try:
        full = Orch({**orch.env, "ORCH_JOURNAL_DIR": str(tmp_path)}, orch.folder, IMPATIENT)
        process = full.start("sweep", full.sweep_file(brief, name), "--inline")
        assert process.stdout is not None
        process.stdout.readline()  # the sweep is open
        filler = tmp_path / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
        output, _ = process.communicate(timeout=100)
    finally:
        os.system(f"umount -l {tmp_path}")
    assert process.returncode == 1, output
    assert f"cannot write the journal in {tmp_path}" in output
    assert "No space left on device" in output
    assert "until then reports wait in memory; after 1 s trials fail" in output
    assert "ORCH_JOURNAL_DIR" in output
    assert "Traceback" not in output
    assert orch.rows(f"select state from sweeps where sweep = '{name}'") == [{"state": "interrupted"}]
    assert orch.rows(f"select count(*) as n from runs where sweep = '{name}' and state = 'running'") == [{"n": 0}]
    assert f"{name}: 2/2 finished" in orch("sweep", orch.sweep_file(brief, name), "--resume", "--inline").out


# The folder `.orch` is deleted while its server runs


@pytest.fixture
def deleted_home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path / ".orch")
    yield home
    embedded.stop(home)
    shutil.rmtree(home.short_folder, ignore_errors=True)


def test_a_server_whose_folder_was_deleted_is_ended_before_a_new_one_starts_there(deleted_home: Home) -> None:
    with Database.from_url(embedded.ensure_running(deleted_home)).connect("orch-test", autocommit=True) as client:
        client.execute("create table many as select generate_series(1, 200000)")
    old = embedded.running(deleted_home)
    assert old is not None
    keeper = psutil.Process(old.pid).parent()
    family = psutil.Process(old.pid).children(recursive=True)
    shutil.rmtree(deleted_home.path)
    for _ in range(3):
        url = embedded.ensure_running(deleted_home)
        assert value_of(url, "select count(*) from pg_class where relname = 'many'") == 0
        new = embedded.running(deleted_home)
        assert new is not None
        assert new.pid != old.pid
        assert not any(_lives(process) for process in family)
        embedded.stop(deleted_home)  # a clean stop and start reads what was written
    assert keeper is not None
    assert wait_for(lambda: not _lives(keeper), 30), "the old keeper would watch the new server"


def test_a_keeper_does_not_touch_the_server_of_a_folder_that_took_the_place_of_its_own(
    deleted_home: Home, tmp_path: Path
) -> None:
    embedded.ensure_running(deleted_home)
    old = embedded.running(deleted_home)
    assert old is not None
    keeper = psutil.Process(old.pid).parent()
    assert keeper is not None
    deleted_home.path.rename(tmp_path / "aside")
    url = embedded.ensure_running(deleted_home)
    with suppress(psutil.NoSuchProcess):  # it may have noticed by itself
        keeper.send_signal(signal.SIGTERM)
    assert wait_for(lambda: not _lives(keeper), 30)
    assert value_of(url, "select 1") == 1
    new = embedded.running(deleted_home)
    assert new is not None
    assert displaced_servers(deleted_home.path / "postgres", deleted_home.short_folder) == []
