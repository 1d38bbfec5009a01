"""`orch sweep --simulate --curves SWEEP`: what a sweep of the database reported, replayed under a scheduler."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import NotFound, OrchError
from orchestrator.schedulers import make_scheduler
from orchestrator.search import make_searcher
from orchestrator.simulating import recorded_curves
from orchestrator.simulation import simulate
from orchestrator.spec import parse_sweep
from orchestrator.trial import TrialState, jsonable
from orchestrator.workload import describe, flatten
from tests.integration.test_views import Lab

SWEEP = """
workload: moe_router
metric: val/mse
params:
  steps: 30
  c_z: {grid: [0, 1e-4, 1e-3, 1e-2]}
scheduler: {algorithm: asha, grace_steps: 10, reduction_factor: 3}
"""
CURVES = {0.0: [3.0, 2.0, 1.0], 1e-4: [4.0, 2.0, 0.1], 1e-3: [2.0, math.inf, math.nan]}


def test_recorded_curves_are_found_by_config_and_replayed(
    server_url: str, database_on: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = parse_sweep(SWEEP, "again.yaml", describe)
    with database_on(server_url) as url:
        lab = Lab(url, tmp_path)
        sweep = lab.sweep("past", {"c_z": "double precision"}, "val/mse", axes=[], params={}, show=[])
        for c_z, values in reversed(CURVES.items()):  # in another order than the new sweep's
            config = flatten(describe("moe_router").resolve({"steps": 30, "c_z": c_z}))
            trial = lab.begin(sweep, {name: jsonable(value) for name, value in config.items()})
            lab.log(trial, "val/mse", dict(zip((10, 20, 30), values, strict=True)))
            lab.log(trial, "train/loss", {10: 0.0})
            lab.end(trial)

        def query(text: str, values: Sequence[Any] = ()) -> tuple[list[str], list[tuple[Any, ...]]]:
            cursor = lab.connection.execute(text, values)
            return [column.name for column in cursor.description or ()], cursor.fetchall()

        config = flatten(describe("moe_router").resolve({"steps": 30, "c_z": 1e-2}))
        stopped = lab.begin(sweep, {name: jsonable(value) for name, value in config.items()})
        lab.log(stopped, "val/mse", {10: 0.1})
        lab.end(stopped, TrialState.STOPPED)
        curves, num_cut_short = recorded_curves(query, spec, "past")
        assert num_cut_short == 1
        result = simulate(spec, make_searcher(spec), make_scheduler(spec), curves, num_workers=1)
        assert [trial.state.value for trial in result.trials] == ["finished", "stopped", "diverged"]
        assert [trial.step for trial in result.trials] == [30, 10, 20]
        assert result.num_without_curve == 1
        with pytest.raises(NotFound, match="did you mean past"):
            recorded_curves(query, spec, "pasd")
        with pytest.raises(OrchError, match="sweep past trained moe_router, not char_gpt"):
            recorded_curves(query, parse_sweep("workload: char_gpt\nmetric: val/loss\n", "c.yaml", describe), "past")
        lab.connection.close()
        lab.engine.dispose()
