"""`orch status SWEEP --spec`: what a sweep asks, whole, as a file that can be run again."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import Orch

TIED = """
    # Does x matter?
    workload: orch_lab:Trivial
    metric: {name: val/loss, mode: min}
    params:
      x: {grid: [0, 1.0]}
      k: {grid: [1, 2]}
    seeds: 2
    when: {x: {k: 2}}
    exclude: [{k: 2, seed: 1, x: 1}]
    log_every: 5
"""


def test_the_resolved_spec_is_stored_and_run_again_it_is_the_same_sweep(orch: Orch, name: str, tmp_path: Path) -> None:
    orch("sweep", orch.sweep_file(TIED, name), "--inline", "--set", "log_every=2", "--set", "tags={a: 'x, y'}")
    text = orch("status", name, "--spec").out
    assert text.startswith("# Does x matter?\n")
    assert {"when: {x: {k: 2}}", "log_every: 2", 'tags: {a: "x, y"}'} <= set(text.splitlines())
    file = tmp_path / "again.yaml"
    file.write_text(text)
    assert "Does x matter?" in orch("sweep", str(file), "--resume").out
    assert orch.rows(f"select count(*) as n from runs where sweep = '{name}'") == [{"n": 5}]


def test_it_needs_a_sweep_that_exists(orch: Orch, name: str) -> None:
    assert "needs the name of a sweep" in orch("status", "--spec", expect=2).err
    assert f"unknown sweep '{name}'" in orch("status", name, "--spec", expect=2).err
