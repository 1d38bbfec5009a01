"""Quick looks before Ray is started or joined, which take a minute to fail. Starts nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from orchestrator.errors import ResourceError
from orchestrator.execution.ray_tune import environment
from orchestrator.execution.ray_tune.cluster import Cluster, Node

CONNECT_TIMEOUT_S = 5.0
POLL_S = 0.5
ASK_TIMEOUT_S = 30.0
ASK_WITHOUT_TOKEN = """
import sys
from ray._private.services import canonicalize_bootstrap_address
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=canonicalize_bootstrap_address(sys.argv[1])).internal_kv_get(b"orch", None, timeout=5)
except AuthenticationError:
    print("refused")
else:
    print("let in")
"""
PORTS = {"http": 80, "https": 443}


def refuse_silent_address(address: str, patience_s: float = 0.0) -> None:
    """Raises ResourceError when `host:port` is no address or nothing listens there. Other forms are Ray's to judge.

    `patience_s`: as in `_why_silent`.
    """
    if "://" in address:
        raise ResourceError(
            f"RAY_ADDRESS={address}  is not the form that a sweep needs; write HOST:PORT of the head (usually 6379), "
            "or add --detach, which takes the address of the head's job server (http://HOST:8265)"
        )
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if not host or not port.isdigit():
        raise ResourceError(f"RAY_ADDRESS={address}  is no address; write HOST:PORT of the head (usually 6379)")
    if why := _why_silent(host, int(port), patience_s):
        raise ResourceError(
            f"RAY_ADDRESS={address}  no Ray cluster answers ({why}); "
            "start one there (ray start --head), or unset it: the sweep then starts a Ray of its own"
        )


def refuse_silent_server(url: str) -> None:
    """Raises ResourceError when `url` is not that of a web server, or nothing listens there."""
    parts = urlsplit(url)
    if parts.scheme not in PORTS or not parts.hostname:
        raise ResourceError(f"{url}  is no address of a job server; write http://HOST:8265")
    if why := _why_silent(parts.hostname, parts.port or PORTS[parts.scheme]):
        raise ResourceError(
            f"{url}  no job server answers ({why}); it runs on the head of a cluster (port 8265) where Ray was "
            "installed with it: pip install 'orch-sweeps[cluster]', then ray start --head"
        )


def _why_silent(host: str, port: int, patience_s: float = 0.0) -> str:
    """Why nothing can be reached there; empty as soon as something listens.

    Tries again for `patience_s`, beyond which the last try may take CONNECT_TIMEOUT_S where not even a refusal comes.
    """
    give_up_at = time.monotonic() + patience_s
    while True:
        try:
            socket.create_connection((host, port), CONNECT_TIMEOUT_S).close()
            return ""
        except (OSError, OverflowError) as error:
            if time.monotonic() >= give_up_at:
                return getattr(error, "strerror", None) or str(error)
        time.sleep(POLL_S)


def asks_for_token(address: str, patience_s: float = 0.0) -> bool:
    """Whether the cluster at `host:port` or `auto` refuses whoever brings no token.

    A process of its own asks, since a process's way of authenticating is fixed once Ray is imported. Raises
    ResourceError when no cluster answers. `patience_s`: as in `_why_silent`.
    """
    refuse_silent_address(address, patience_s)
    env = {name: value for name, value in os.environ.items() if name not in environment.TOKEN_VARIABLES}
    command = [sys.executable, "-c", ASK_WITHOUT_TOKEN, address]
    try:
        done = subprocess.run(
            command,
            env={**env, "RAY_AUTH_MODE": "disabled"},
            capture_output=True,
            text=True,
            timeout=ASK_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ResourceError(f"RAY_ADDRESS={address}  what listens there does not answer as Ray does") from None
    answer = done.stdout.strip()
    if answer not in ("refused", "let in"):
        last_line = (done.stderr.strip() or "it said nothing").splitlines()[-1]
        raise ResourceError(f"RAY_ADDRESS={address}  no Ray cluster answers ({last_line})")
    return answer == "refused"


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
