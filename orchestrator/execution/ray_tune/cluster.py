"""Starts a local Ray or attaches to a running one, and says what it can give. Runs no trial."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import ResourceError
from orchestrator.execution.ray_tune import environment
from orchestrator.execution.ray_tune.undisturbed import undisturbed

OBJECT_STORE_BYTES = 200 * 1024 * 1024  # trials pass a few kilobytes through it
NAMESPACE = "orch"


@dataclass(frozen=True)
class Node:
    """One machine of the cluster, as far as placing trials is concerned."""

    node_id: str
    host: str
    cpus: float
    gpus: float

    def capacity(self, cpu: float, gpu: float) -> int:
        """How many trials fit at once. A GPU share never spans two GPUs: 2 GPUs hold four trials of 0.4, not five."""
        by_cpu = math.floor(self.cpus / cpu + 1e-9)
        if gpu == 0:
            return by_cpu
        by_gpu = math.floor(self.gpus) * math.floor(1 / gpu + 1e-9) if gpu <= 1 else math.floor(self.gpus / gpu)
        return min(by_cpu, by_gpu)


@dataclass(frozen=True)
class Cluster:
    """A connected Ray."""

    nodes: tuple[Node, ...]
    is_local: bool  # started by this command, on this host only
    scratch: Path

    @property
    def has_remote_nodes(self) -> bool:
        return len({node.host for node in self.nodes}) > 1

    def capacity(self, cpu: float, gpu: float) -> int:
        """Trials that fit at once. Raises ResourceError when not even one ever will."""
        fits = sum(node.capacity(cpu, gpu) for node in self.nodes)
        if fits > 0:
            return fits
        most_gpus = max((node.gpus for node in self.nodes), default=0)
        most_cpus = max((node.cpus for node in self.nodes), default=0)
        if most_cpus == 0:
            raise ResourceError("the cluster has no worker yet; start one, or wait for those that are starting")
        if gpu > most_gpus:
            raise ResourceError(f"resources.gpu  a trial needs {gpu:g} GPU, have {most_gpus:g}; set resources.gpu: 0")
        raise ResourceError(
            f"resources.cpu  a trial needs {cpu:g} CPUs, the largest node has {most_cpus:g}; lower resources.cpu"
        )


@contextlib.contextmanager
def local_cluster(scratch: Path, token_file: Path) -> Iterator[Cluster]:
    """A Ray of our own for the time of the sweep, reachable with our token only. Call from the main thread."""
    environment.prepare(token_file)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*_python_path(), str(Path.cwd())]))
    import ray

    with undisturbed(), environment.without_logins():
        ray.init(
            address="local",  # without it Ray attaches to any cluster it finds
            namespace=NAMESPACE,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(scratch),
        )
    try:
        yield Cluster(alive_nodes(), is_local=True, scratch=scratch)
    finally:
        ray.shutdown()
        leave(scratch)


def why_not_attached(address: str, runtime_env: Mapping[str, Any]) -> str:
    """Connects to a running Ray, whose workers get `runtime_env`; Ray's words when it does not answer, else empty."""
    import ray

    try:
        with undisturbed():
            ray.init(
                address=address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level="ERROR",
                runtime_env=dict(runtime_env),
            )
    except (ConnectionError, ValueError, RuntimeError) as error:
        return str(error).strip().split("\n")[0]
    return ""


@contextlib.contextmanager
def attached_cluster(address: str, scratch: Path, packages: Sequence[str]) -> Iterator[Cluster]:
    """A running cluster. The code of `packages` (top-level names) travels with the connection.

    Raises ResourceError when nothing answers at `address`.
    """
    environment.prepare(None)
    import ray

    if reason := why_not_attached(address, {"py_modules": [str(folder_of(package)) for package in packages]}):
        raise ResourceError(f"RAY_ADDRESS={address}  no Ray cluster answers ({reason}); start one, or unset it")
    try:
        yield Cluster(alive_nodes(), is_local=False, scratch=scratch)
    finally:
        ray.shutdown()
        leave(scratch)


def leave(scratch: Path) -> None:
    """A session leaves 5 MB that nobody deletes; the folder around ours goes with the last command that used it."""
    shutil.rmtree(scratch, ignore_errors=True)
    with contextlib.suppress(OSError):
        scratch.parent.rmdir()


def _python_path() -> list[str]:
    return [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]


def folder_of(package: str) -> Path:
    """Where a top-level package, or a module that is a single file, was found."""
    module = sys.modules.get(package) or __import__(package)
    if module.__file__ is None:
        return Path(next(iter(module.__path__)))
    file = Path(module.__file__)
    return file.parent if file.name == "__init__.py" else file


def node_of_actor(actor_id: str) -> str:
    """Where an actor lives or died; empty when Ray does not know. A private name of Ray 2.60, guarded by a test."""
    import ray

    address = ray._private.state.actors(actor_id).get("Address", {})
    return str(address.get("NodeID", ""))


def alive_nodes() -> tuple[Node, ...]:
    """The cluster's machines as they are now."""
    import ray

    return tuple(
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0),
        )
        for node in ray.nodes()
        if node["Alive"]
    )
