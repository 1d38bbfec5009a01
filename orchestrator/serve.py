"""Starts MLflow's UI and the dashboards as child processes and waits for Ctrl-C. Serves nothing itself."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from orchestrator.errors import OrchError
from orchestrator.settings import artifact_root
from orchestrator.workspace import Workspace, open_workspace, quiet_mlflow

START_TIMEOUT_S = 90.0
DASHBOARD = "overview.py"


def serve_ui(home: Path | None, host: str, port: int, say: Callable[[str], None]) -> int:
    """Runs both servers until one ends or a signal comes. Raises OrchError when a port is taken."""
    for wanted in (port, port + 1):
        _refuse_taken_port(host, wanted)
    workspace = open_workspace(home)
    quiet_mlflow()
    with _child(_mlflow_command(workspace, host, port), _mlflow_environment(workspace)) as mlflow:
        with _child(_dashboard_command(host, port + 1), _dashboard_environment(workspace, host, port)) as dashboards:
            children = {"MLflow": mlflow, "dashboards": dashboards}
            _wait_until_up(f"http://{host}:{port}/health", mlflow)
            _wait_until_up(f"http://{host}:{port + 1}/", dashboards)
            say(f"MLflow      http://{host}:{port}")
            say(f"dashboards  http://{host}:{port + 1}")
            say("Ctrl-C stops both; the database stays up.")
            return _wait(children)


def _mlflow_command(workspace: Workspace, host: str, port: int) -> list[str]:
    root = artifact_root(workspace.settings, workspace.home)
    flags = ["--host", host, "--port", str(port), "--workers", "1", "--default-artifact-root", root]
    return [sys.executable, "-m", "mlflow", "server", *flags]


def _mlflow_environment(workspace: Workspace) -> dict[str, str]:
    """The database's URL goes through the environment: a command line is everybody's to read."""
    return {
        "MLFLOW_BACKEND_STORE_URI": workspace.database.mlflow_uri,
        "MLFLOW_SQLALCHEMYSTORE_POOL_SIZE": "2",
        "MLFLOW_SQLALCHEMYSTORE_MAX_OVERFLOW": "0",
    }


def _dashboard_command(host: str, port: int) -> list[str]:
    spec = importlib.util.find_spec("dashboards")
    if spec is None or not spec.submodule_search_locations:
        raise OrchError("the folder dashboards/ is missing from this installation; install orch again")
    app = Path(next(iter(spec.submodule_search_locations))) / DASHBOARD
    flags = ["--host", host, "--port", str(port), "--headless", "--no-token"]
    return [sys.executable, "-m", "marimo", "run", *flags, str(app)]


def _dashboard_environment(workspace: Workspace, host: str, port: int) -> dict[str, str]:
    """Dashboards read the views only, as the role that can read nothing else."""
    return {"ORCH_READER_URL": workspace.reader_database.url, "ORCH_MLFLOW_UI": f"http://{host}:{port}"}


@contextlib.contextmanager
def _child(command: list[str], extra: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A child in a process group of its own, so that stopping it stops its workers too."""
    process = subprocess.Popen(command, env={**os.environ, **extra}, start_new_session=True, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _refuse_taken_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise OrchError(
                f"--port  {host}:{port} cannot be used ({error.strerror}); choose another: orch ui --port N"
            ) from error


def _wait_until_up(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise OrchError(f"{url} did not start: its process ended with exit code {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):  # not listening yet
            time.sleep(0.2)
    raise OrchError(f"{url} did not answer within {START_TIMEOUT_S:.0f} s")


def _wait(children: dict[str, subprocess.Popen[bytes]]) -> int:
    """Returns 0 after a signal, 1 when a child ended by itself."""
    stop = False

    def asked(number: int, frame: object) -> None:
        nonlocal stop
        stop = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, asked)
    while not stop:
        for name, child in children.items():
            if child.poll() is not None:
                print(f"{name} ended with exit code {child.returncode}", file=sys.stderr)
                return 1
        time.sleep(0.2)
    return 0
