"""Tries whether every node of a cluster sees and can write the folder of the artifacts. Leaves nothing in it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.errors import ResourceError
from orchestrator.execution.ray_tune.cluster import Cluster
from orchestrator.tracking.artifacts import local_folder

ANSWER_TIMEOUT_S = 120.0  # a node's first process may have to fetch the sweep's code


def refuse_unshared_root(cluster: Cluster, root: str, cpu: float, gpu: float) -> None:
    """Raises ResourceError, naming the nodes, when `root` is a folder that not all that will train share with us.

    A folder of the same name that is another one is found out as well: what we write there must be seen. Buckets are
    not tried: the node's first artifact tells.
    """
    folder = local_folder(root)
    if folder is None:
        return
    probe = folder / f".orch-probe-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        reasons = _ask_all(cluster, probe, cpu, gpu)
    finally:
        probe.unlink(missing_ok=True)
    if reasons:
        raise ResourceError(
            f"ORCH_ARTIFACT_ROOT={root}  the cluster's nodes do not all share this folder\n"
            + "".join(f"  {host}: {reason}\n" for host, reason in reasons.items())
            + "mount one folder under this path on every node (NFS, a volume), or set ORCH_ARTIFACT_ROOT to a bucket (s3://...)"
        )


def _ask_all(cluster: Cluster, probe: Path, cpu: float, gpu: float) -> dict[str, str]:
    """Why a node cannot use the folder of `probe`, by its address; only those that cannot."""
    ask = ray.remote(num_cpus=0, max_retries=0)(why_not_shared)
    answers = {
        node.host: ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)).remote(
            str(probe)
        )
        for node in cluster.nodes
        if node.capacity(cpu, gpu)
    }
    return {host: reason for host, answer in answers.items() if (reason := _answer(answer))}


def _answer(answer: ray.ObjectRef) -> str:
    try:
        return str(ray.get(answer, timeout=ANSWER_TIMEOUT_S))
    except (ray.exceptions.RayError, TimeoutError) as error:
        return f"gave no answer ({str(error).strip().splitlines()[0]})"


def why_not_shared(probe: str) -> str:
    """Runs on a node: why a run cannot keep artifacts beside `probe`, written elsewhere; empty if it can."""
    folder = os.path.dirname(probe)
    if not os.path.exists(probe):
        return f"sees another {folder}, or none"
    try:
        own = f"{probe}-{secrets.token_hex(8)}"
        with open(own, "xb"):
            pass
        os.unlink(own)
    except OSError as error:
        return f"cannot write {folder}: {error.strerror or error}"
    return ""
