"""A context for a trial that nobody runs: for tests, benchmarks and notebooks. Stores nothing beyond its own life."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from orchestrator.trial import Finding
from orchestrator.workload import Checkpoint, stream_seed


class NoCheckpoint:
    """Is never due and keeps nothing."""

    is_kept = False

    def load(self) -> bytes | None:
        return None

    def due(self, step: int) -> bool:
        return False

    def save(self, step: int, state: bytes) -> None:
        """Nobody goes on from here."""


@dataclass
class Alone:
    """See `orchestrator.workload.Context`. Findings are collected; streams are those of a trial with the same seed."""

    trial_seed: int = 0
    log_every: int = 10
    thresholds: Mapping[str, float] = field(default_factory=dict)
    device: str = "cpu"
    gpu_share: float = 0.0
    trial: int = 0
    attempt: int = 1
    findings: list[Finding] = field(default_factory=list)
    checkpoint: Checkpoint = field(default_factory=NoCheckpoint)

    @property
    def stopping(self) -> bool:
        return False

    def should_report(self, step: int) -> bool:
        return step % self.log_every == 0

    def seed(self, stream: str) -> int:
        return stream_seed(self.trial_seed, stream)

    def generator(self, stream: str) -> np.random.Generator:
        return np.random.default_rng(self.seed(stream))

    def finding(self, finding: Finding) -> None:
        self.findings.append(finding)

    def artifact(self, path: Path, name: str | None = None) -> None:
        """There is no run to store it with."""
