"""The probes that watch every training run of the engine."""

from __future__ import annotations

from workloads.probes.catalogue import Thresholds
from workloads.probes.probe import Probe


def standard_probes(thresholds: Thresholds, compiled: bool) -> list[Probe]:
    """One of each; a `compiled` model is not looked into, since hooks would make it another program."""
    return []
