"""What a sweep file says, as frozen values. Parsing lives in `parse.py`; expansion into candidates in `search/`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from orchestrator.spec.domains import Domain

Mode = Literal["min", "max"]


@dataclass(frozen=True)
class Metric:
    name: str
    mode: Mode = "min"

    def better(self, left: float, right: float) -> bool:
        """True if `left` beats `right`; both finite."""
        return left < right if self.mode == "min" else left > right


@dataclass(frozen=True)
class Search:
    algorithm: Literal["grid", "random", "optuna"] = "grid"
    samples: int | None = None  # configurations per grid cell, each run with every seed
    seed: int = 0
    sampler: Literal["tpe"] = "tpe"


@dataclass(frozen=True)
class Resources:
    cpu: float = 1.0
    gpu: float = 0.0
    max_concurrent: int | None = None  # worker processes; None = as many as fit
    trial_time_s: float | None = None


@dataclass(frozen=True)
class Retries:
    count: int = 0
    any_error: bool = False  # False: worker death, out of memory and timeouts only


@dataclass(frozen=True)
class SweepSpec:
    """A question. `fixed` and `axes` are by dotted field name, in the order of the file."""

    name: str
    workload: str
    metric: Metric
    fixed: Mapping[str, Any]
    axes: Mapping[str, Domain]
    search: Search = Search()
    resources: Resources = Resources()
    retries: Retries = Retries()
    stop_diverged: bool = True
    log_every: int = 10
    tags: Mapping[str, str] = field(default_factory=dict)
    description: str = ""
    source: str = ""  # the file's text
    lines: Mapping[str, str] = field(default_factory=dict)  # path -> `file:line`, for later messages

    def where(self, path: str) -> str:
        """`file:line` of a path such as `params.k`, or of its nearest parent in the file."""
        while path not in self.lines and "." in path:
            path = path.rpartition(".")[0]
        return self.lines.get(path, "")
