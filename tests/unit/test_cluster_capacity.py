"""How many trials a cluster holds at once: by CPUs, and by shares of single GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.errors import ResourceError
from orchestrator.execution.ray_tune.cluster import Cluster, Node


def cluster(*nodes: tuple[float, float]) -> Cluster:
    """A cluster of nodes with (CPUs, GPUs)."""
    made = (Node(f"node{index}", f"host{index}", cpus, gpus) for index, (cpus, gpus) in enumerate(nodes))
    return Cluster(tuple(made), is_local=False, scratch=Path())


@pytest.mark.parametrize(
    ("nodes", "cpu", "gpu", "fits"),
    [
        ([(64, 2)], 1, 0.4, 4),  # 2 / 0.4 = 5 would let one trial span two GPUs
        ([(64, 8)], 1, 0.15, 48),  # not 53
        ([(2, 8)], 1, 0.15, 2),
        ([(4, 0), (2, 0)], 2, 0, 3),
        ([(64, 4)], 1, 2, 2),
    ],
)
def test_a_gpu_share_never_spans_two_gpus(nodes: list[tuple[float, float]], cpu: float, gpu: float, fits: int) -> None:
    assert cluster(*nodes).capacity(cpu, gpu) == fits


def test_what_no_node_can_ever_give_is_refused_with_both_numbers() -> None:
    with pytest.raises(ResourceError, match="needs 1 GPU, have 0"):
        cluster((4, 0)).capacity(1, 1)
    with pytest.raises(ResourceError, match=r"needs 8 CPUs.*has 4"):
        cluster((4, 0), (4, 0)).capacity(8, 0)
