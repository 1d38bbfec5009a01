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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from orchestrator import background
from orchestrator.errors import OrchError
from orchestrator.settings import Home, artifact_root
from orchestrator.signals import handled_by
from orchestrator.workspace import Workspace, find_home, open_workspace

NAME = "ui"  # of the service in the background
MLFLOW, DASHBOARDS = "MLflow", "dashboards"
HOST, PORT = "127.0.0.1", 5000
NUM_PORTS = 40  # that are tried, in pairs, where nobody named one
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 8.0
POLL_S = 0.1
ANSWER_TIMEOUT_S = 10.0
DASHBOARD = "overview.py"
MLFLOW_READY = "/api/2.0/mlflow/experiments/search?max_results=1"  # unlike /health it opens the database
MLFLOW_SESSION = "orch ui (MLflow)"  # what MLflow's connections are called in pg_stat_activity
WILDCARDS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class Server:
    """One of the two servers. `health` is a path that answers once the server is ready."""

    name: str
    command: list[str]
    environment: Mapping[str, str]
    host: str
    port: int
    health: str
    log: Path

    @property
    def url(self) -> str:
        """Where a browser on this host finds it."""
        host = WILDCARDS.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


@dataclass(frozen=True)
class Child:
    """A server that was started; its words stand in its log from `offset` on, in bytes."""

    server: Server
    process: subprocess.Popen[bytes]
    offset: int

    def last_words(self) -> str:
        """The last line that says something, and where the rest is."""
        words = background.last_words(self.server.log, self.offset).split("\n")
        lines = [line.strip() for line in words if line.strip()]
        return (f": {lines[-1]}" if lines else "") + f"\nread {self.server.log}"


class StopRequest:
    """Whether a signal has asked us to stop."""

    received = False

    def note(self, number: int, frame: FrameType | None) -> None:
        self.received = True


@contextlib.contextmanager
def stop_request() -> Iterator[StopRequest]:
    stop = StopRequest()
    with handled_by(stop.note):
        yield stop


def serve_ui(home: Path | None, host: str, port: int | None, say: Callable[[str], None]) -> int:
    """Runs both servers until one ends or a signal comes. Returns 0 after a signal, 1 when a server ended by itself.

    Where the one that `orch up` started serves already, says so and returns 0. Raises OrchError, with nothing left
    running, when a port is taken or a server does not start.
    """
    found = _in_background(find_home(home)[1])
    if found is not None and host == HOST and port in (None, found.facts["port"]):
        for line in (*addresses(found), "It runs in the background; orch down stops it."):
            say(line)
        return 0
    port = PORT if port is None else port
    for wanted in (port, port + 1):
        _refuse_taken_port(host, wanted)
    mark = os.environ.pop(background.MARK, "")  # not for the database's server: it outlives the UI
    workspace = open_workspace(home)
    if mark:
        os.environ[background.MARK] = mark
    mlflow = _mlflow(workspace, host, port)
    servers = [mlflow, _dashboards(workspace, host, port + 1, mlflow.url)]
    with stop_request() as stop, _running(servers) as children:
        for child in children:
            if not _is_up(child, stop):
                return 0
        if mark:
            background.announce(workspace.home, NAME, {"port": port, **{one.name: one.url for one in servers}})
        for server in servers:
            say(_address(server.name, server.url))
        if host in WILDCARDS:
            say(f"Both listen on every address of this host ({host}) and ask for no password.")
        say("Ctrl-C stops both; the database stays up.")
        return _wait(children, stop)


def start_ui(home: Home, port: int | None) -> background.Service:
    """The UI in the background: the one that runs, or a new one. Raises OrchError if it does not start.

    Without `port` it takes the first free pair from the usual one on: each home has its own.
    """
    if (found := _in_background(home)) is not None:
        return found
    port = port or _free_pair()
    for wanted in (port, port + 1):
        _refuse_taken_port(HOST, wanted)
    return background.start(home, NAME, background.orch("--home", str(home.path), "ui", "--port", str(port)))


def _in_background(home: Home) -> background.Service | None:
    """The UI that runs there. What a dead one has left is ended: its servers hold the ports."""
    found = background.find(home, NAME)
    if found is not None and found.is_up:
        return found
    background.stop(home, NAME)
    return None


def addresses(service: background.Service) -> list[str]:
    """What a person types into a browser."""
    return [_address(name, service.facts[name]) for name in (MLFLOW, DASHBOARDS)]


def _address(name: str, url: str) -> str:
    return f"{name:<11} {url}"


def _mlflow(workspace: Workspace, host: str, port: int) -> Server:
    """MLflow's own server. The database's URL goes through the environment: a command line is everybody's to read.

    Artifacts are read where the runs say they are, so the server needs no upload proxy and no folder of its own. Its
    job runner (evaluation of language models) would be seven more processes.
    """
    root = artifact_root(workspace.settings, workspace.home)
    flags = ["--host", host, "--port", str(port), "--workers", "1", "--default-artifact-root", root]
    environment = {
        "MLFLOW_BACKEND_STORE_URI": workspace.database.mlflow_uri,
        "PGAPPNAME": MLFLOW_SESSION,
        # MLflow opens two pools, for runs and for models; one call may need two connections. So 2 when idle, 4 at most.
        "MLFLOW_SQLALCHEMYSTORE_POOL_SIZE": "1",
        "MLFLOW_SQLALCHEMYSTORE_MAX_OVERFLOW": "1",  # 0 counts as not set, and SQLAlchemy's default is 10
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": os.environ.get("MLFLOW_DISABLE_TELEMETRY", "true"),
    }
    command = [sys.executable, "-m", "mlflow", "server", *flags, "--no-serve-artifacts"]
    log = background.log_file(workspace.home, "mlflow")
    return Server(MLFLOW, command, environment, host, port, MLFLOW_READY, log)


def _dashboards(workspace: Workspace, host: str, port: int, mlflow_url: str) -> Server:
    """marimo with our app, which logs in as the role that reads the views and nothing else."""
    flags = ["--host", host, "--port", str(port), "--headless", "--no-token", "--no-sandbox"]
    environment = {
        "ORCH_READER_URL": workspace.reader_database.url,
        "ORCH_MLFLOW_UI": mlflow_url if host not in WILDCARDS else f"http://0.0.0.0:{port - 1}",
        "MARIMO_SKIP_UPDATE_CHECK": "1",
    }
    command = [sys.executable, "-m", "marimo", "run", *flags, str(_app_file())]
    log = background.log_file(workspace.home, "dashboards")
    return Server(DASHBOARDS, command, environment, host, port, "/health", log)


def _app_file() -> Path:
    spec = importlib.util.find_spec("dashboards")
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        if (Path(folder) / DASHBOARD).is_file():
            return Path(folder) / DASHBOARD
    raise OrchError("the folder dashboards/ is missing from this installation; install orch again")


@contextlib.contextmanager
def _running(servers: Sequence[Server]) -> Iterator[list[Child]]:
    """Starts them side by side; at the end asks all to stop, then makes them. None outlives the block."""
    children: list[Child] = []
    try:
        for server in servers:
            environment = {**_inherited_environment(), **server.environment}
            # In a process group of its own: stopping the group stops its workers too.
            children.append(Child(server, *background.spawn(server.command, server.log, environment)))
        yield children
    finally:
        _stop([child.process for child in children])


def _inherited_environment() -> dict[str, str]:
    """Ours without the owner's login: each server is told the address that it may use."""
    return {name: value for name, value in os.environ.items() if name != "ORCH_DATABASE_URL"}


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        _signal_group(process, signal.SIGTERM)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        _signal_group(process, signal.SIGKILL)  # whoever is left: a worker may outlive its parent
        process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # nobody is left in the group
        os.killpg(process.pid, number)


def _free_pair() -> int:
    """The first of the two ports; the usual one if none of those that are tried is free."""
    for port in range(PORT, PORT + NUM_PORTS, 2):
        with contextlib.suppress(OrchError):  # taken
            _refuse_taken_port(HOST, port)
            _refuse_taken_port(HOST, port + 1)
            return port
    return PORT


def _refuse_taken_port(host: str, port: int) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        option = "--host" if isinstance(error, socket.gaierror) else "--port"
        raise OrchError(
            f"{option}  {host}:{port} cannot be used ({error.strerror}); "
            "choose another (the dashboards take the port after MLflow's) with --port N"
        ) from error


def _is_up(child: Child, stop: StopRequest) -> bool:
    """Waits for the server's first answer; False when we are asked to stop before. Raises OrchError."""
    server = child.server
    deadline = time.monotonic() + START_TIMEOUT_S
    while not stop.received:
        if (code := child.process.poll()) is not None:
            raise OrchError(f"{server.name} did not start (exit code {code}){child.last_words()}")
        if _answers(server.url + server.health):
            return True
        if time.monotonic() > deadline:
            raise OrchError(f"{server.name} did not answer within {START_TIMEOUT_S:.0f} s{child.last_words()}")
        time.sleep(POLL_S)
    return False


def _answers(url: str) -> bool:
    no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy cannot reach our loopback
    try:
        with no_proxy.open(url, timeout=ANSWER_TIMEOUT_S):
            return True
    except (urllib.error.URLError, OSError):  # not listening yet, or not ready
        return False


def _wait(children: Sequence[Child], stop: StopRequest) -> int:
    while not stop.received:
        for child in children:
            if (code := child.process.poll()) is not None:
                print(f"{child.server.name} ended with exit code {code}{child.last_words()}", file=sys.stderr)
                return 1
        time.sleep(POLL_S)
    return 0
