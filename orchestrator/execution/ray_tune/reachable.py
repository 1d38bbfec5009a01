"""Quick looks before Ray is started or joined, which take a minute to fail. Starts nothing."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from orchestrator.errors import ResourceError
from orchestrator.execution.ray_tune.cluster import Cluster, Node

CONNECT_TIMEOUT_S = 5.0


def refuse_silent_address(address: str) -> None:
    """Raises ResourceError when `host:port` is no address or nothing listens there. Other forms are Ray's to judge."""
    if "://" in address:
        raise ResourceError(
            f"RAY_ADDRESS={address}  is not the form that a sweep needs; write HOST:PORT of the head (usually 6379)"
        )
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if not host or not port.isdigit():
        raise ResourceError(f"RAY_ADDRESS={address}  is no address; write HOST:PORT of the head (usually 6379)")
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ResourceError(
            f"RAY_ADDRESS={address}  no Ray cluster answers ({getattr(error, 'strerror', None) or error}); "
            "start one there (ray start --head), or unset it: the sweep then starts a Ray of its own"
        ) from None


def refuse_more_than_this_machine(cpu: float, gpu: float) -> None:
    """Raises ResourceError, as the started Ray would, when a trial can never run on this host."""
    if os.environ.get("RAY_OVERRIDE_RESOURCES"):  # Ray then believes what it is told
        return
    from ray._private.accelerators import get_accelerator_manager_for_resource
    from ray._private.utils import get_num_cpus

    manager = get_accelerator_manager_for_resource("GPU")
    visible = manager.get_current_process_visible_accelerator_ids() if manager else None
    num_gpus = manager.get_current_node_num_accelerators() if manager else 0
    num_gpus = num_gpus if visible is None else min(num_gpus, len(visible))
    this_host = Node("", "localhost", get_num_cpus(override_docker_cpu_warning=True), num_gpus)
    Cluster((this_host,), is_local=True, scratch=Path()).capacity(cpu, gpu)
