"""What a node answers when it is asked whether it shares the folder of the artifacts. Asks no cluster."""

from __future__ import annotations

from pathlib import Path

from orchestrator.execution.ray_tune.shared_root import why_not_shared


def test_a_node_that_sees_the_probe_and_can_write_beside_it_shares_the_folder(
    tmp_path: Path,
) -> None:
    probe = tmp_path / "probe"
    probe.touch()
    assert why_not_shared(str(probe)) == ""
    assert list(tmp_path.iterdir()) == [probe]


def test_a_node_with_a_folder_of_the_same_name_that_is_another_one_does_not_share_it(tmp_path: Path) -> None:
    assert why_not_shared(f"{tmp_path}/probe") == f"sees another {tmp_path}, or none"
