"""A Ray that `orch up --ray` keeps: sweeps without an address join it, one at a time. Runs no trial itself.

Run as `python -m orchestrator.execution.ray_tune.warm HOME`, it holds a Ray until it is asked to end. Nothing of a
sweep stays in it: every sweep gets processes of its own, with the environment, folder and code of its own command.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

import orchestrator
from orchestrator import background
from orchestrator.execution.ray_tune import environment
from orchestrator.execution.ray_tune.cluster import Cluster, alive_nodes, leave, local_cluster, why_not_attached
from orchestrator.locks import is_free, try_lock
from orchestrator.settings import Home

NAME = "ray"
LOCK = "ray.lock"  # held, and filled with its name, by the command whose sweep trains there
TOKEN = "ray_token"
# What a process must be started with. The rest of a command's environment its workers put on before they import code.
AT_START = ("CUDA_", "DYLD_", "LD_", "MKL_", "NVIDIA_", "OMP_", "OPENBLAS_", "PYTHON", "RAY_")
KEPT = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV", "XDG_RUNTIME_DIR")
SET_BY_RAY = ("CUDA_VISIBLE_DEVICES",)  # for each worker, by its share
OURS = (*environment.TUNE_AND_RAY, environment.USAGE_STATISTICS, *environment.TOKEN_VARIABLES, "RAY_AUTH_MODE")
VARYING = (*OURS, "PYTHONPATH", "RAY_ADDRESS", "RAY_CLIENT_MODE")  # the last is set by the import of ray


def start(home: Home) -> background.Service:
    """Starts a warm Ray with as little of our environment as it needs. Raises OrchError."""
    kept = {name: value for name, value in os.environ.items() if name in KEPT or name.startswith(AT_START)}
    command = [sys.executable, "-P", "-m", __name__, str(home.path)]
    return background.start(home, NAME, command, kept)


@contextlib.contextmanager
def joined(home: Home, scratch: Path) -> Iterator[tuple[Cluster | None, str]]:
    """The warm Ray of `home` for the time of a sweep; or None, and why not where there should be one.

    Call from the main thread.
    """
    service = background.find(home, NAME)
    if service is None:
        yield None, ""
    elif not service.is_up:
        _clear_away(home)
        yield None, "the warm Ray of `orch up --ray` has died; this sweep starts its own. orch up --ray starts another"
    elif different := [name for name, value in made_of().items() if service.facts.get(name) != value]:
        yield None, f"the warm Ray was started with another {different[0]}; this sweep starts its own"
    elif (lock := try_lock(home.path / LOCK)) is None:
        yield None, "the warm Ray serves another sweep; this one starts its own"
    else:
        try:
            _sign(lock)
            yield from _attached(str(service.facts["address"]), home, scratch)
        finally:
            os.close(lock)


def _attached(address: str, home: Home, scratch: Path) -> Iterator[tuple[Cluster | None, str]]:
    environment.prepare(home.secret_file(TOKEN))
    import ray

    hook = put_on(own_environment(), Path.cwd(), list(sys.path))
    if reason := why_not_attached(address, {"worker_process_setup_hook": hook}):
        yield None, f"the warm Ray does not answer ({reason}); this sweep starts its own"
        return
    try:
        yield Cluster(alive_nodes(), is_local=True, scratch=scratch), ""
    finally:
        ray.shutdown()
        leave(scratch)


def _sign(lock: int) -> None:
    from orchestrator.ledger.process import process_name  # a sweep has the ledger loaded; who holds a Ray need not

    os.truncate(lock, 0)
    os.write(lock, process_name().encode())


def user_of(home: Home) -> str:
    """`<pid>@<host>` of the command whose sweep trains on the warm Ray, or trained there when that died; else empty."""
    path = home.path / LOCK
    return "" if not path.exists() or is_free(path) else path.read_text()


def _clear_away(home: Home) -> None:
    """Ends what a dead warm Ray has left, unless a sweep still trains there."""
    if (lock := try_lock(home.path / LOCK)) is not None:
        try:
            background.stop(home, NAME)
        finally:
            os.close(lock)


def made_of() -> dict[str, str]:
    """What a Ray and whoever joins it must have in common."""
    at_start = {name: value for name, value in os.environ.items() if name.startswith(AT_START) and name not in VARYING}
    return {
        "Python": sys.executable,
        "version of Ray": version("ray"),
        "installation of orch": str(Path(orchestrator.__file__).parent),
        "environment": hashlib.sha256(repr(sorted(at_start.items())).encode()).hexdigest(),
    }


def own_environment() -> dict[str, str]:
    """What this command's workers are to find in theirs; logins reach the recorder in another way."""
    left_out = (*environment.LOGINS, *SET_BY_RAY, background.MARK)
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_") and name not in left_out}


def put_on(variables: Mapping[str, str], folder: Path, path: list[str]) -> Callable[[], None]:
    """What a worker does before it imports anybody's code. It travels in Ray's memory, and stands in no log."""

    def hook() -> None:
        os.environ.update(variables)
        os.chdir(folder)
        sys.path[:] = [*path, *(place for place in sys.path if place not in path)]

    return hook


def hold(home: Home) -> None:
    """Keeps a Ray until SIGTERM comes."""
    asked_to_end = threading.Event()
    os.umask(0o077)
    facts = made_of()
    scratch = home.scratch()
    os.chdir(scratch)
    with local_cluster(scratch, home.secret_file(TOKEN)):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: asked_to_end.set())
        import ray

        background.announce(home, NAME, {**facts, "address": ray.get_runtime_context().gcs_address})
        asked_to_end.wait()
    background.withdraw(home, NAME)


if __name__ == "__main__":
    hold(Home(Path(sys.argv[1])))
