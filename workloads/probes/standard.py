"""The probes that watch every training run of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from workloads.probes.catalogue import Thresholds
from workloads.probes.gradients import GradientProbe, UpdateProbe
from workloads.probes.loss import LossProbe
from workloads.probes.loss_scale import LossScaleProbe
from workloads.probes.probe import Probe


def standard_probes(
    thresholds: Thresholds, model: nn.Module, blocks: Mapping[str, Sequence[nn.Parameter]]
) -> list[Probe]:
    """One of each that needs to know nothing of the model."""
    return [
        LossProbe(thresholds),
        UpdateProbe(thresholds),
        GradientProbe(thresholds, model, blocks),
        LossScaleProbe(thresholds),
    ]
