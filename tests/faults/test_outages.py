"""The database goes away: before a sweep, in the middle of one, or under a server that keeps few connections."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import pytest

from orchestrator.database import embedded
from orchestrator.settings import Home
from tests.conftest import DatabaseOn, Orch
from tests.faults.conftest import FragileServer, num_points, value_of, wait_until
from tests.warm import WarmProcess

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
HELD = SLOW.replace("sleep_s: 0.1", "sleep_s: 0.1\n      hold: %s")  # the third trial waits for that file
DISTINCT = "count(distinct (run_id, key, step))"
POINTS = f"select count(*) as n, {DISTINCT} as d from metrics where sweep = '%s'"


def test_a_sweep_outlives_its_database_keeps_its_name_and_every_point_arrives_once(
    fragile: FragileServer, ray_orch: Orch, name: str, tmp_path: Path
) -> None:
    orch = Orch({**ray_orch.env, **fragile.orch.env}, fragile.orch.folder)
    file = orch.sweep_file(HELD % (tmp_path / "go"), name)
    process = orch.start_warm("sweep", file)
    wait_until(lambda: num_points(orch.env["ORCH_DATABASE_URL"], name) > 20, timeout_s=120)
    fragile.stop()
    time.sleep(4)  # longer than a trial has left: one ends while nobody can be told
    fragile.start()
    before = []
    for line in process.stdout:
        before.append(line)
        if "the database is back" in line:
            break
    assert "this sweep is being run by" in orch("sweep", file, "--inline", "--resume", expect=2).err
    (tmp_path / "go").touch()
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


ONE_LONG = """
    workload: orch_lab:Trivial
    metric: {name: val/loss, mode: min}
    params: {steps: 100000, sleep_s: 0.02}
    log_every: 1
"""
TROUBLE, OVER = "the database takes nothing at the moment", "the database is back after"


class Reader:
    """Reads what a command prints, while it prints it."""

    def __init__(self, process: WarmProcess) -> None:
        self.process, self.lines = process, list[str]()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        self.lines.extend(iter(self.process.stdout.readline, ""))

    def said(self, text: str) -> list[str]:
        return [line for line in self.lines if text in line]

    def wait_for(self, text: str, times: int) -> None:
        wait_until(lambda: len(self.said(text)) >= times or self.process.poll() is not None)
        assert len(self.said(text)) == times, "".join(self.lines)

    def rest(self) -> str:
        self.process.wait(timeout=120)
        self._thread.join()
        return "".join(self.lines)


@pytest.mark.slow
def test_every_kind_of_outage_in_mid_sweep_is_told_once_stops_no_trial_and_costs_no_point(
    fragile: FragileServer, name: str
) -> None:
    process = fragile.orch.start_warm("sweep", fragile.orch.sweep_file(ONE_LONG, name), "--inline")
    reader = Reader(process)
    wait_until(lambda: num_points(fragile.orch.env["ORCH_DATABASE_URL"], name) > 5)
    outages: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "in a read-only transaction": fragile.read_only,
        "No space left on device": fragile.full,
        "": partial(killed_and_crowded, fragile),
    }
    if not fragile.is_small:
        del outages["No space left on device"]
    for number, (reason, outage) in enumerate(outages.items(), 1):
        with outage():
            reader.wait_for(TROUBLE, number)
        fragile.start()  # a server whose disk was full may have ended itself
        reader.wait_for(OVER, number)
        assert reason in reader.said(TROUBLE)[-1]
    fragile.stop()
    process.send_signal(signal.SIGTERM)
    started = time.monotonic()
    output = reader.rest()
    assert time.monotonic() - started < 30  # what a spot instance has
    fragile.start()
    assert process.returncode == 130, output
    assert len(reader.said(OVER)) == len(outages)
    assert "what was reported is safe in the journal and is written by the next command" in output
    assert "Traceback" not in output
    assert fragile.orch.rows(f"select state from runs where sweep = '{name}'") == [{"state": "lost"}]
    fragile.orch(
        "sweep", fragile.orch.sweep_file(ONE_LONG, name), "--inline", "--name", f"{name}_b", "--set", "params.steps=1"
    )
    [row] = fragile.orch.rows(
        f"select max(step) as last, count(*) as n, {DISTINCT} as d from metrics where sweep = '{name}'"
    )
    assert row["n"] == row["d"] == 5 * row["last"]


@contextmanager
def killed_and_crowded(fragile: FragileServer) -> Iterator[None]:
    """A server that dies without a word, and once it is back has no connection left."""
    fragile.kill()
    wait_until(lambda: embedded.running(fragile.home) is None)
    fragile.start()
    with fragile.crowded():
        yield


@contextmanager
def away(fragile: FragileServer) -> Iterator[None]:
    fragile.stop()
    try:
        yield
    finally:
        fragile.start()


@pytest.mark.parametrize(
    ("outage", "message"),
    [
        (away, "cannot connect"),
        (FragileServer.read_only, "takes no writes (default_transaction_read_only is on)"),
        (FragileServer.crowded, "it has no connection left"),
    ],
    ids=["away", "read-only", "at its connection limit"],
)
def test_a_sweep_does_not_start_while_the_database_takes_nothing(
    fragile: FragileServer,
    name: str,
    outage: Callable[[FragileServer], AbstractContextManager[None]],
    message: str,
) -> None:
    with outage(fragile):
        refused = fragile.orch("sweep", fragile.orch.sweep_file(SLOW, name), "--inline", expect=2)
    assert message in refused.err
    assert refused.err.count("\n") == 1
    assert fragile.orch.rows(f"select count(*) as n from sweeps where sweep = '{name}'") == [{"n": 0}]


def test_a_first_start_on_a_full_disk_says_so_in_a_line_and_makes_nothing(
    fragile: FragileServer, name: str, database_on: DatabaseOn
) -> None:
    if not fragile.is_small:
        pytest.skip("needs the right to mount a small file system")
    with database_on(fragile.orch.env["ORCH_DATABASE_URL"]) as url:
        orch = Orch({**fragile.orch.env, "ORCH_DATABASE_URL": url}, fragile.orch.folder)
        with fragile.full():
            refused = orch("sweep", orch.sweep_file(SLOW, name), "--inline", expect=2)
        fragile.start()
        assert "No space left on device" in refused.err
        assert refused.err.count("\n") == 1
        assert value_of(url, "select to_regclass('orch_ledger.sweeps')") is None


def test_a_sweep_starts_a_killed_embedded_server_again_and_leaves_a_stopped_one_to_the_next_command(
    orch: Orch, tmp_path: Path, name: str
) -> None:
    apart = Orch({**orch.env, "ORCH_HOME": str(tmp_path / ".orch")}, tmp_path)
    quick = HELD.replace("sleep_s: 0.1", "sleep_s: 0.02")  # nothing hangs on its length: the third trial waits
    process = apart.start_warm("sweep", apart.sweep_file(quick % (tmp_path / "go"), name), "--inline")
    for line in process.stdout:
        if line.startswith("1/3"):
            break
    home = Home(tmp_path / ".orch")
    server = embedded.running(home)
    assert server is not None
    try:
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: embedded.running(home) not in (None, server))  # by the sweep itself: nobody else is awake
        refusal = apart("down", expect=2).err
        assert refusal.startswith(f"sweep {name} is being run by {process.pid}@")
        assert f"orch cancel {name} " in refusal
        assert "is stopped" in apart("down", "--force").out
        (tmp_path / "go").touch()
        time.sleep(1)
        apart("status")
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        assert f"{name}: 3/3 finished" in output
        assert apart.rows(POINTS % name) == [{"n": 3 * 30 * 5, "d": 3 * 30 * 5}]
    finally:
        process.kill()
        apart("down")


ON_THE_NODE = ("orch recorder", "orch judge")


@pytest.mark.slow
def test_sixteen_workers_and_fifty_parameters_need_few_connections_with_a_scheduler_and_a_mirror(
    fragile: FragileServer, ray_orch: Orch, name: str
) -> None:
    orch = Orch({**ray_orch.env, **fragile.orch.env}, fragile.orch.folder)
    text = """
        workload: orch_lab:Wide
        metric: loss
        params: {a00: {int: [0, 1000]}}
        seeds: 2
        search: {algorithm: optuna, sampler: qmc, samples: 16}
        scheduler: {algorithm: median, max_steps: 2}
        log_every: 1
        resources: {cpu: 0.1, max_concurrent: 16}
    """
    seen: list[Counter[str]] = []
    done = threading.Event()

    def sample() -> None:
        clients = "backend_type = 'client backend' and application_name <> 'orch-tests'"
        while not done.wait(0.1):
            names = f"select array_agg(application_name) from pg_stat_activity where {clients}"
            seen.append(Counter(fragile.value(names) or []))

    watcher = threading.Thread(target=sample)
    watcher.start()
    try:
        orch("sweep", orch.sweep_file(text, name), timeout_s=300)
    finally:
        done.set()
        watcher.join()
    assert len(seen) > 10
    of_node = [sum(names[name] for name in ON_THE_NODE) for names in seen]
    assert max(of_node) <= 4
    of_command = [names.total() - on_node for names, on_node in zip(seen, of_node, strict=True)]
    assert max(of_command) <= 3, max(seen, key=Counter.total)
    assert {name for names in seen for name in names} >= {"orch recorder", "orch mirror"}
    assert (
        fragile.value("select count(*) from public.runs where name like %s and status = 'FINISHED'", f"{name}-%") == 32
    )
    assert orch.rows(f'select count(*) as n, max("a48") as last from sweep_{name}') == [{"n": 32, "last": 48}]
