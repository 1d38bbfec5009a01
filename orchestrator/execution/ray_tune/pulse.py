"""Sees when the Ray beneath a sweep dies, which Tune waits for without end. Ends nothing itself."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import ray

from orchestrator.execution.ray_tune.cluster import alive_nodes

LOOK_EVERY_S = 1.0
VITAL = ("gcs_server", "raylet")


def why_dead() -> str:
    """What is gone without which no trial can train; empty while all is well.

    A Ray of our own is a child of this process: private names of Ray 2.60, guarded by a test. Of any other its head
    knows within seconds whether the node of this command lives; where the head itself dies, Ray ends us after a minute.
    """
    node = ray._private.worker._global_node
    for kind, process in node.dead_processes() if node is not None else ():
        if kind in VITAL:
            return f"Ray's process {kind} has died (exit code {process.returncode})"
    here = ray.get_runtime_context().get_node_id()
    is_alive = any(one.node_id == here for one in alive_nodes())
    return "" if is_alive else "the Ray node on which this command runs has died"


@contextlib.contextmanager
def watched(tell: Callable[[str], None]) -> Iterator[None]:
    """Calls `tell`, once and from a thread, as soon as there is a `why_dead`."""
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK_EVERY_S):
            if (why := why_dead()) and not is_over.is_set():
                tell(why)
                return

    thread = threading.Thread(target=look, name="orch-pulse", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
