"""Where a sweep's trials train: a Ray of our own, a running cluster, or this process. Writes no row."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import ResourceError
from orchestrator.planning import SweepRequest
from orchestrator.search import plan_count
from orchestrator.settings import Home
from orchestrator.spec import SweepSpec
from orchestrator.workload import Description

if TYPE_CHECKING:
    from orchestrator.execution.ray_tune.cluster import Cluster
    from orchestrator.execution.sweep_run import SweepRun
    from orchestrator.tracking.recorder import Remainder
    from orchestrator.workspace import Workspace


@dataclass(frozen=True)
class Backend:
    """Where the trials train: a running local Ray, a cluster, or this process."""

    num_workers: int
    device: str
    run: Callable[[SweepRun], Sequence[Remainder]]
    remark: str = ""  # for the person


def limit_threads(num_cpus: float) -> None:
    """Has torch take as many threads as Ray would allow its worker. Without effect once torch has been imported."""
    if not os.environ.get("OMP_NUM_THREADS"):
        os.environ["OMP_NUM_THREADS"] = str(max(1, int(num_cpus)))


@contextlib.contextmanager
def open_backend(
    workspace: Workspace, spec: SweepSpec, workload: Description, request: SweepRequest, beside: threading.Thread
) -> Iterator[Backend]:
    """Starts or reaches the backend and makes sure the request fits, before any row is written.

    `beside` is started as soon as ray is imported: what it imports then loads while Ray's processes come up.
    """
    if request.inline:
        beside.start()
        yield _inline_backend(workspace, spec)
        return
    address = request.address or workspace.settings.ray_address
    token_file = workspace.home.secret_file("ray_token")
    _import_ray(None if address else token_file)
    _refuse_what_ray_would(spec, address)
    beside.start()
    packages = sorted({"orchestrator", "workloads", workload.package})
    with _ray(workspace.home, address, token_file, packages) as (cluster, remark):
        yield _ray_backend(workspace, spec, cluster, remark)


def _import_ray(token_file: Path | None) -> None:
    """Puts into the environment what ray looks for when it is imported, and only then, and imports it."""
    from orchestrator.execution.ray_tune import environment

    environment.prepare(token_file)
    importlib.import_module("orchestrator.execution.ray_tune.driver")


def _refuse_what_ray_would(spec: SweepSpec, address: str | None) -> None:
    """Raises ResourceError for what a Ray that is started or joined would refuse a minute later."""
    from orchestrator.execution.ray_tune.reachable import refuse_more_than_this_machine, refuse_silent_address

    if address:
        refuse_silent_address(address)
    else:
        refuse_more_than_this_machine(spec.resources.cpu, spec.resources.gpu)


@contextlib.contextmanager
def _ray(home: Home, address: str | None, token_file: Path, packages: Sequence[str]) -> Iterator[tuple[Cluster, str]]:
    """The cluster at `address`, or a Ray of our own; and a remark for the person."""
    from orchestrator.execution.ray_tune.cluster import attached_cluster

    scratch = home.scratch()
    if address:
        with attached_cluster(address, scratch, packages) as cluster:
            yield cluster, ""
    else:
        with _own_ray(home, scratch, token_file) as (cluster, remark):
            yield cluster, remark


def _ray_backend(workspace: Workspace, spec: SweepSpec, cluster: Cluster, remark: str) -> Backend:
    """Raises ResourceError where the cluster has no room for a trial, or its nodes cannot reach what they need."""
    from orchestrator.execution.ray_tune.driver import run_on_ray
    from orchestrator.execution.ray_tune.shared_root import refuse_unshared_root

    cpu, gpu = spec.resources.cpu, spec.resources.gpu
    fits = cluster.capacity(cpu, gpu)
    if cluster.has_remote_nodes:
        _refuse_local_storage(workspace)
        refuse_unshared_root(cluster, workspace.settings.artifact_root or "", cpu, gpu)
    num_workers = min(fits, spec.resources.max_concurrent or fits, plan_count(spec))
    run = functools.partial(
        run_on_ray,
        cluster=cluster,
        num_workers=num_workers,
        cpu=cpu,
        gpu=gpu,
        database_url=workspace.database.url,
        journal_folder=str(workspace.journal) if cluster.is_local else workspace.identity,
    )
    return Backend(num_workers, "cuda" if gpu else "cpu", run, remark)


@contextlib.contextmanager
def _own_ray(home: Home, scratch: Path, token_file: Path) -> Iterator[tuple[Cluster, str]]:
    """The warm Ray of `orch up --ray` if it can be had, else one for the time of the sweep, and a remark on it."""
    from orchestrator.execution.ray_tune.cluster import local_cluster
    from orchestrator.execution.ray_tune.warm import joined

    with joined(home, scratch) as (warm, remark):
        if warm is not None:
            yield warm, remark
    if warm is None:
        with local_cluster(scratch, token_file) as cold:
            yield cold, remark


def _inline_backend(workspace: Workspace, spec: SweepSpec) -> Backend:
    from orchestrator.execution.inline import run_inline

    if spec.resources.gpu:
        raise ResourceError("resources.gpu  --inline trains on this process's CPU; leave out --inline, or set gpu: 0")
    limit_threads(spec.resources.cpu)
    return Backend(1, "cpu", lambda feed: [run_inline(feed, workspace.database.url, workspace.journal)])


def _refuse_local_storage(workspace: Workspace) -> None:
    if workspace.is_embedded:
        raise ResourceError(
            "the cluster has nodes beyond this host, which cannot reach the embedded database; "
            "set ORCH_DATABASE_URL to a PostgreSQL that all nodes reach"
        )
    if workspace.settings.artifact_root is None:
        raise ResourceError(
            "the cluster has nodes beyond this host, which cannot reach .orch/artifacts; "
            "set ORCH_ARTIFACT_ROOT to a folder or bucket that all nodes reach"
        )
