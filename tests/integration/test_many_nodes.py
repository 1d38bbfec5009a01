"""Ray clusters of several nodes, all of them processes of this machine: a bad one takes no more trials."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
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

    def end(self) -> None:
        for leader in reversed(self._processes):
            for process in [*psutil.Process(leader.pid).children(recursive=True), psutil.Process(leader.pid)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            leader.wait(timeout=30)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def two_nodes(orch: Orch, home: Home) -> Iterator[Orch]:
    """`orch` attached to a cluster whose second node is bad: trials that look for it die there."""
    folder = Path(tempfile.mkdtemp(prefix="orch-nodes-", dir="/tmp"))
    token = str(home.secret_file("ray_token"))
    env = {**orch.env, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token, "RAY_USAGE_STATS_ENABLED": "0"}
    port = free_port()
    nodes = Nodes(env, folder)
    try:
        head = nodes.start("--head", f"--port={port}", f"--temp-dir={folder}", "--include-dashboard=false")
        nodes.wait_for(lambda: _answers(port))
        second = nodes.start(f"--address=127.0.0.1:{port}", **{BAD: "1"})
        nodes.wait_for(lambda: head() and second())
        yield Orch({**env, "RAY_ADDRESS": f"127.0.0.1:{port}"}, orch.folder)
    finally:
        nodes.end()
        shutil.rmtree(folder, ignore_errors=True)


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
