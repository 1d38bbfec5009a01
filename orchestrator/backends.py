"""Where a sweep's trials train: a Ray of our own, a running cluster, or this process. Writes no row."""

from __future__ import annotations

import contextlib
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
    journal = workspace.journal
    if request.inline:
        beside.start()
        yield _inline_backend(workspace, journal, spec)
        return
    from orchestrator.execution.ray_tune import environment

    address = request.address or workspace.settings.ray_address
    token_file = workspace.home.secret_file("ray_token")
    environment.prepare(None if address else token_file)
    from orchestrator.execution.ray_tune.cluster import attached_cluster
    from orchestrator.execution.ray_tune.driver import run_on_ray
    from orchestrator.execution.ray_tune.reachable import refuse_more_than_this_machine, refuse_silent_address
    from orchestrator.execution.ray_tune.shared_root import refuse_unshared_root

    if address:
        refuse_silent_address(address)
    else:
        refuse_more_than_this_machine(spec.resources.cpu, spec.resources.gpu)
    beside.start()
    scratch = workspace.home.scratch()
    packages = sorted({"orchestrator", "workloads", workload.package})
    with contextlib.ExitStack() as stack:
        remark = ""
        if address:
            cluster = stack.enter_context(attached_cluster(address, scratch, packages))
        else:
            cluster, remark = stack.enter_context(_own_ray(workspace.home, scratch, token_file))
        resources = spec.resources
        fits = cluster.capacity(resources.cpu, resources.gpu)
        if cluster.has_remote_nodes:
            _refuse_local_storage(workspace)
            refuse_unshared_root(cluster, workspace.settings.artifact_root or "", resources.cpu, resources.gpu)
        num_workers = min(fits, resources.max_concurrent or fits, plan_count(spec))

        def run(feed: SweepRun) -> Sequence[Remainder]:
            return run_on_ray(
                feed,
                cluster,
                num_workers=num_workers,
                cpu=resources.cpu,
                gpu=resources.gpu,
                database_url=workspace.database.url,
                journal_folder=str(journal if cluster.is_local else workspace.remote_journal),
            )

        yield Backend(num_workers, "cuda" if resources.gpu else "cpu", run, remark)


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


def _inline_backend(workspace: Workspace, journal: Path, spec: SweepSpec) -> Backend:
    from orchestrator.execution.inline import run_inline

    if spec.resources.gpu:
        raise ResourceError("resources.gpu  --inline trains on this process's CPU; leave out --inline, or set gpu: 0")
    limit_threads(spec.resources.cpu)
    return Backend(1, "cpu", lambda feed: [run_inline(feed, workspace.database.url, journal)])


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
