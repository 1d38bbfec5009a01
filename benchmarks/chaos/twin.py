"""The undisturbed twin of a sweep: the same configs, trained here in one go, without orch, Ray or a database."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch

from benchmarks.chaos.workload import Witnessed
from workloads.engine.alone import Alone

Value = tuple[int, str, int, float]
"""Trial, key, step, value."""


def values_of(trials: Mapping[int, Mapping[str, Any]]) -> Iterator[Value]:
    """What trials of these params report, by number."""
    for number, params in trials.items():
        calm = {**params, "witness": "", "pause_s": 0.0}
        yield from ((number, key, step, value) for key, step, value in _trained(json.dumps(calm)))


@lru_cache
def _trained(params: str) -> list[tuple[str, int, float]]:
    config = Witnessed.Config(**json.loads(params))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a worker of one CPU has; sums depend on it
    try:
        reports = list(Witnessed().run(config, Alone(trial_seed=config.seed, log_every=1)))
    finally:
        torch.set_num_threads(threads)
    return [(key, report.step, float(value)) for report in reports for key, value in report.metrics.items()]
