"""Ray clusters of several nodes, all of them processes of this machine: one is bad, or goes away in mid-sweep."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import psycopg
import pytest

from orchestrator.settings import Home
from tests.conftest import Orch, free_port

BAD = "ORCH_LAB_BAD_NODE"
START_TIMEOUT_S = 120.0


class Nodes:
    """Raylets of one cluster, each of one CPU."""

    def __init__(self, env: dict[str, str], folder: Path) -> None:
        self._env, self._folder = env, folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str, **more_env: str) -> Callable[[], bool]:
        """Begins to start one; the answer tells whether it is up."""
        log = self._folder / f"log{len(self._processes)}"
        ray = Path(sys.executable).with_name("ray")
        with log.open("wb") as output:
            command = [ray, "start", *arguments, "--num-cpus=1", "--block"]
            env = {**self._env, **more_env}
            self._processes.append(
                subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
            )
        return lambda: "Ray runtime started" in log.read_text()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not condition():
            assert all(process.poll() is None for process in self._processes), "a node did not start"
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def kill_last(self) -> None:
        """With -9, and all that it has started, as a machine dies."""
        leader = self._processes.pop()
        for process in [*psutil.Process(leader.pid).children(recursive=True), psutil.Process(leader.pid)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        leader.wait(timeout=30)

    def end(self) -> None:
        while self._processes:
            self.kill_last()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@dataclass(frozen=True)
class Cluster:
    """Two nodes with a disk for journals each, and `orch` attached to them."""

    orch: Orch
    nodes: Nodes
    journal_of_second: Path
    start_second: Callable[[], None]


@contextmanager
def cluster_of_two(orch: Orch, home: Home, **env_of_second: str) -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="orch-nodes-", dir="/tmp"))
    token = str(home.secret_file("ray_token"))
    env = {**orch.env, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token, "RAY_USAGE_STATS_ENABLED": "0"}
    port = free_port()
    nodes = Nodes(env, folder)
    journal = folder / "second"

    def start_second() -> None:
        is_up = nodes.start(f"--address=127.0.0.1:{port}", ORCH_JOURNAL_DIR=str(journal), **env_of_second)
        nodes.wait_for(is_up)

    try:
        head = nodes.start("--head", f"--port={port}", f"--temp-dir={folder}", "--include-dashboard=false")
        nodes.wait_for(lambda: _answers(port))
        start_second()
        nodes.wait_for(head)
        yield Cluster(Orch({**env, "RAY_ADDRESS": f"127.0.0.1:{port}"}, orch.folder), nodes, journal, start_second)
    finally:
        nodes.end()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def two_nodes(orch: Orch, home: Home) -> Iterator[Orch]:
    """`orch` attached to a cluster whose second node is bad: trials that look for it die there."""
    with cluster_of_two(orch, home, **{BAD: "1"}) as cluster:
        yield cluster.orch


@pytest.mark.slow
def test_a_node_where_trials_die_is_avoided_and_costs_no_trial(two_nodes: Orch, name: str, tmp_path: Path) -> None:
    text = f"""
        workload: orch_lab:Brittle
        metric: num_graves
        params: {{graves: {tmp_path}}}
        seeds: 5
    """
    done = two_nodes("sweep", two_nodes.sweep_file(text, name))
    assert f"{name}: 5/5 finished" in done.out
    assert done.out.count("takes no more trials of this sweep: trials ") == 1
    runs = two_nodes.rows(
        f"select attempts, metrics.value from runs join metrics using (run_id) where runs.sweep = '{name}'"
    )
    assert sorted(run["attempts"] for run in runs) == [1, 1, 2, 2, 2]
    assert {run["value"] for run in runs} == {3}  # nobody was sent there any more


NUM_STEPS = 30
RESUMABLE = f"""
    workload: orch_lab:Counter
    metric: {{name: count, mode: max}}
    params: {{steps: {NUM_STEPS}, sleep_s: 0.1}}
    seeds: 4
    log_every: 1
    checkpoint_every: 5
    retries: 1
"""


@pytest.mark.slow
@pytest.mark.parametrize("comes_back", [True, False])
def test_a_node_that_dies_and_comes_back_costs_no_point_and_one_that_stays_away_is_named(
    orch: Orch, home: Home, server_url: str, name: str, tmp_path: Path, comes_back: bool
) -> None:
    """All that was reported lies in journals when it dies, since the database takes no points until then."""
    with cluster_of_two(orch, home) as cluster:
        ours = replace(cluster.orch, env={**cluster.orch.env, "ORCH_ARTIFACT_ROOT": str(tmp_path)})
        ours("status")  # makes the tables
        with psycopg.connect(server_url) as blocker:
            blocker.execute("lock table public.metrics in share mode")  # everybody reads, nobody writes
            sweep = ours.start("sweep", ours.sweep_file(RESUMABLE, name))
            cluster.nodes.wait_for(lambda: len({path.parent for path in tmp_path.rglob("step-*")}) == 2)
            cluster.nodes.kill_last()
        if comes_back:
            cluster.start_second()
        output, _ = sweep.communicate(timeout=300)
        assert f"{name}: 4/4 finished" in output
        if not comes_back:
            [journal] = cluster.journal_of_second.glob("*/*~*~*")
            assert f"the recorder on {socket.gethostname()} is gone; points of trial" in output
            assert f"may lie there unwritten, in {journal}" in output
            assert sorted(_steps(orch, name)) != [NUM_STEPS] * 4
            there = replace(orch, env={**orch.env, "ORCH_JOURNAL_DIR": str(cluster.journal_of_second)})
            there("resume", name)  # as the remark says
        assert sweep.returncode == (0 if comes_back else 1), output
        assert _steps(orch, name) == [NUM_STEPS] * 4


def _steps(orch: Orch, name: str) -> list[int]:
    """How many points each trial has, one a step."""
    rows = orch.rows(f"""
        select run_id, count(*) as points, count(distinct step) as steps from metrics
        where sweep = '{name}' and key = 'count' group by run_id
    """)
    assert all(row["points"] == row["steps"] for row in rows)
    return [row["steps"] for row in rows]
