"""What outlives a command: a detached sweep, and the web pages and the warm Ray of `orch up` until `orch down`."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator import background, serve, services
from orchestrator.errors import AlreadyExists
from orchestrator.execution.ray_tune import warm
from orchestrator.ledger.process import process_name
from orchestrator.locks import is_free, locked
from orchestrator.settings import Home
from tests.conftest import Orch

SLOW = """
    workload: orch_lab:Talker
    metric: {name: val/loss, mode: min}
    params: {x: {grid: [1, 2]}}
    preflight: false
"""


def wait_until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


def marked(mark: str) -> list[psutil.Process]:
    return list(background._marked(mark))


# A detached sweep


def test_a_detached_sweep_outlives_its_terminal_and_is_followed_to_its_end(orch: Orch, home: Home, name: str) -> None:
    end = orch.folder / f"{name}.end"
    file = orch.sweep_file(SLOW, name)
    starter = orch.start_warm("sweep", file, "--inline", "--detach", "--set", f"params.until={end}")
    said, _ = starter.communicate(timeout=120)
    assert starter.returncode == 0, said
    for command in (f"orch status {name}", f"orch logs {name} -f", f"orch cancel {name}"):
        assert command in said
    found = re.search(r"process (\d+), whose output is in (\S+)", said)
    assert found is not None, said
    pid, log = int(found[1]), Path(found[2])
    assert orch.rows(f"select state from sweeps where sweep = '{name}'") == [{"state": "running"}]
    assert os.getsid(pid) == pid, "a session of its own: what happens to ours does not reach it"
    assert log == home.path / "logs" / f"sweep-{name}.log"
    assert log.stat().st_mode & 0o777 == 0o600
    follower = orch.start_warm("logs", name, "-f")
    assert follower.stdout is not None
    assert f"sweep {name}: 2 trials" in follower.stdout.readline()
    end.touch()
    out, _ = follower.communicate(timeout=120)
    assert "2/2  trial 1  finished" in out
    assert (follower.returncode, out.splitlines()[-1]) == (0, f"{name} is finished: 2 finished")
    wait_until(lambda: not psutil.pid_exists(pid))
    assert "2/2 finished" in log.read_text()


@pytest.mark.parametrize(
    ("change", "words", "answer"),
    [
        (("x: {grid", "y: {grid"), [], "params.y"),
        (("orch_lab:Talker", "orch_lab:Toker"), [], "Toker"),
        (("", ""), ["--set", "resources.gpu=1", "--inline"], "--inline trains on this process's CPU"),
        (("", ""), ["--simulate"], "--detach  a simulation"),
    ],
)
def test_what_a_sweep_refuses_is_refused_in_the_foreground(
    orch: Orch, home: Home, name: str, change: tuple[str, str], words: list[str], answer: str
) -> None:
    done = orch("sweep", orch.sweep_file(SLOW.replace(*change), name), "--detach", *words, expect=2)
    assert answer in done.err
    assert "Traceback" not in str(done)
    assert orch.rows(f"select sweep from sweeps where sweep = '{name}'") == []


def test_a_taken_name_is_exit_2_and_a_finished_sweep_shows_its_comparison(orch: Orch, name: str) -> None:
    file = orch.sweep_file(SLOW, name)
    orch("sweep", file, "--inline")
    refused = orch("sweep", file, "--inline", "--detach", expect=2)
    assert f"sweep {name!r} exists already" in refused.err
    assert "2/2 finished" in orch("sweep", file, "--inline", "--detach", "--resume").out
    assert "2/2 finished" in orch("resume", name, "--detach").out
    assert "unknown sweep" in orch("resume", "nobody", "--detach", expect=2).err


# Services


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple[Home, background.Service]]:
    """A toy that is ready, with a worker that is deaf to SIGTERM in a session of its own."""
    home = Home(tmp_path / ".orch").ensure()
    worker = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    code = f"""
import subprocess, sys, time
from pathlib import Path
from orchestrator import background
from orchestrator.settings import Home
subprocess.Popen([sys.executable, "-c", {worker!r}], start_new_session=True)
background.announce(Home(Path({str(home.path)!r})), "toy", {{"address": "nowhere"}})
time.sleep(600)
"""
    yield home, background.start(home, "toy", [background.sys.executable, "-c", code])
    background.stop(home, "toy")


def test_a_service_is_stopped_with_all_it_started_also_when_it_has_died_itself(
    service: tuple[Home, background.Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "STOP_TIMEOUT_S", 0.3)
    home, toy = service
    assert toy.is_up
    assert toy.facts == {"address": "nowhere"}
    assert (home.path / "toy.json").stat().st_mode & 0o777 == 0o600
    family = marked(toy.mark)
    assert len(family) == 2
    os.kill(toy.pid, signal.SIGKILL)
    wait_until(lambda: not toy.is_up)
    assert not is_free(background.log_file(home, "toy")), "its worker may write there"
    assert background.stop(home, "toy")
    assert marked(toy.mark) == []
    assert is_free(background.log_file(home, "toy"))
    assert not background.stop(home, "toy"), "nothing is left, and that is no error"


@pytest.fixture
def killed(
    service: tuple[Home, background.Service], monkeypatch: pytest.MonkeyPatch
) -> tuple[Home, background.Service]:
    """The toy after a kill -9, its worker alive."""
    monkeypatch.setattr(background, "STOP_TIMEOUT_S", 0.3)
    home, toy = service
    os.kill(toy.pid, signal.SIGKILL)
    wait_until(lambda: not toy.is_up)
    assert len(marked(toy.mark)) == 1
    return home, toy


def test_the_servers_of_a_ui_that_was_killed_are_ended_by_the_next_one(killed: tuple[Home, background.Service]) -> None:
    home, toy = killed
    (home.path / "toy.json").rename(home.path / "ui.json")
    assert serve._in_background(home) is None
    assert marked(toy.mark) == [], "they would hold the ports that are looked at next"


def test_a_service_that_takes_a_dead_ones_place_ends_what_it_left(killed: tuple[Home, background.Service]) -> None:
    home, toy = killed
    with pytest.raises(background.OrchError, match="the next one"):
        background.start(home, "toy", [background.sys.executable, "-c", "raise SystemExit('the next one')"])
    assert marked(toy.mark) == []


def test_a_stale_file_ends_nobody_whose_pid_it_names(tmp_path: Path) -> None:
    home = Home(tmp_path / ".orch").ensure()
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        (home.path / "ui.json").write_text(json.dumps({"pid": bystander.pid, "mark": "another", "port": 5000}))
        assert not background.stop(home, "ui")
        assert bystander.poll() is None
        assert not (home.path / "ui.json").exists()
    finally:
        bystander.kill()
        bystander.wait()


def test_a_service_that_does_not_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    home = Home(tmp_path / ".orch").ensure()
    with pytest.raises(background.OrchError, match="no module called sesame"):
        background.start(home, "toy", [background.sys.executable, "-c", "raise SystemExit('no module called sesame')"])
    assert background.find(home, "toy") is None


# orch up, orch down


@pytest.fixture
def apart(orch: Orch, tmp_path: Path) -> Iterator[tuple[Orch, Home]]:
    """`orch` with a home and a server of its own."""
    home = Home(tmp_path / ".orch")
    own = Orch({**orch.env, "ORCH_HOME": str(home.path)}, tmp_path)
    yield own, home
    own("down")
    shutil.rmtree(home.short_folder, ignore_errors=True)


def test_up_serves_both_pages_on_loopback_until_down_and_says_the_same_twice(apart: tuple[Orch, Home]) -> None:
    orch, home = apart
    first = orch("up").out
    urls = re.findall(r"^(?:MLflow|dashboards) +(http://127\.0\.0\.1:\d+)$", first, re.MULTILINE)
    assert len(urls) == 2, first
    service = background.find(home, "ui")
    assert service is not None
    assert (home.path / "ui.json").stat().st_mode & 0o777 == 0o600
    for url in urls:
        with urllib.request.urlopen(f"{url}/health", timeout=20) as answer:
            assert answer.status == 200
    listening = {
        one.laddr.ip for process in marked(service.mark) for one in process.net_connections() if one.status == "LISTEN"
    }
    assert listening == {"127.0.0.1"}
    assert orch("up").out == first
    assert orch("ui").out.splitlines()[:2] == first.splitlines()[-2:]
    said = orch("down").out
    assert "MLflow's UI and the dashboards are stopped" in said
    assert "the embedded PostgreSQL is stopped" in said
    assert marked(service.mark) == []
    assert "dashboards" not in orch("down").out


def test_a_taken_port_is_one_line_and_exit_2(apart: tuple[Orch, Home]) -> None:
    orch, home = apart
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        done = orch("up", "--port", port, expect=2)
    assert re.fullmatch(rf"--port  127\.0\.0\.1:{port} cannot be used .* with --port N\n", done.err)
    assert background.find(home, "ui") is None


# A warm Ray


WARM = """
    workload: warm_lab:Fresh
    metric: {name: val/loss, mode: min}
    params: {x: 1}
    resources: {max_concurrent: 1}
    preflight: false
"""
FRESH = """
import os
from orchestrator.trial import Report
from orchestrator.workload import WorkloadConfig

class Fresh:
    class Config(WorkloadConfig):
        x: float = 0.0

    metrics = ("val/loss",)

    def run(self, config, context):
        print("CODE", config.x, os.environ.get("TALKER_SAYS"), os.environ.get("ORCH_DATABASE_URL"), os.getcwd())
        yield Report(1, {"val/loss": 1.0})
"""


@pytest.mark.slow
def test_sweeps_on_a_warm_ray_see_their_own_code_environment_and_folder_and_leave_no_worker(
    apart: tuple[Orch, Home], tmp_path: Path
) -> None:
    orch, home = apart
    said = orch("up", "--no-ui", "--ray").out
    assert re.search(r"^warm Ray +\S+:\d+ ", said, re.MULTILINE), said
    service = background.find(home, "ray")
    assert service is not None
    assert (home.path / "ray.json").stat().st_mode & 0o777 == 0o600
    assert orch("up", "--no-ui", "--ray").out == said
    for number, code in enumerate(("first", "second")):
        (tmp_path / "warm_lab.py").write_text(FRESH.replace("CODE", code))
        own = Orch({**orch.env, "TALKER_SAYS": code, "PYTHONPATH": str(tmp_path)}, tmp_path)
        done = own("sweep", orch.sweep_file(WARM, f"warm{number}"))
        assert "warm Ray" not in done.out, "nothing to remark"
        assert own("logs", f"warm{number}", "--trial", 0).out.startswith(f"{code} 1.0 {code} None ")
        wait_until(lambda: not [one for one in marked(service.mark) if "ray::" in " ".join(one.cmdline())])
    with (home.path / "ray.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4242@here")
        lock.flush()
        refused = orch("down", expect=2)
    assert refused.err.startswith("a sweep of 4242@here trains on the warm Ray; nothing was stopped\n")
    assert service.is_up
    assert "the warm Ray is stopped" in orch("down").out
    assert marked(service.mark) == []


def test_what_a_dead_warm_ray_left_to_a_sweep_stays_until_that_has_ended(tmp_path: Path) -> None:
    home = Home(tmp_path / ".orch").ensure()
    env = {**os.environ, background.MARK: "0123456789abcdef"}
    node = subprocess.Popen(["sleep", "600"], env=env)
    try:
        (home.path / "ray.json").write_text(json.dumps({"pid": 4_194_304, "mark": "0123456789abcdef"}))
        with locked(home.path / "ray.lock") as lock:
            warm._sign(lock)
            with pytest.raises(AlreadyExists, match=f"under a sweep of {process_name()}"):
                services._ray(home)
            with warm.joined(home, tmp_path) as (cluster, why):
                assert cluster is None
                assert why.startswith("the warm Ray of `orch up --ray` has died")
        assert node.poll() is None
    finally:
        node.kill()
        node.wait()


@pytest.mark.parametrize(
    ("facts", "remark"),
    [
        ({}, "the warm Ray of `orch up --ray` has died; this sweep starts its own"),
        ({"version of Ray": "2.59.0"}, "the warm Ray was started with another version of Ray"),
        ({"environment": "another"}, "the warm Ray was started with another environment"),
    ],
)
def test_a_warm_ray_that_cannot_be_joined_is_one_remark(tmp_path: Path, facts: dict[str, str], remark: str) -> None:
    home = Home(tmp_path / ".orch").ensure()
    mark, pid = "0123456789abcdef", 0 if facts else 4_194_304  # no process has the latter
    env = {**os.environ, background.MARK: "0123456789abcdef"}
    holder = subprocess.Popen(["sleep", "600"], env=env)
    try:
        said = {"pid": pid or holder.pid, "mark": mark, "address": "127.0.0.1:1", **warm.made_of(), **facts}
        (home.path / "ray.json").write_text(json.dumps(said))
        with warm.joined(home, tmp_path) as (cluster, why):
            assert cluster is None
            assert why.startswith(remark)
        with warm.joined(home, tmp_path) as (cluster, why):
            assert (cluster, why == "") == (None, not facts), "a dead one is told once"
        assert (holder.poll() is None) == bool(facts), "what it left is ended"
    finally:
        holder.kill()
        holder.wait()
