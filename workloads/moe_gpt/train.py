"""The workload `moe_gpt`: the right model, or the one with the bug that was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from orchestrator.trial import Finding, Report
from orchestrator.workload import Context
from workloads.moe_gpt.bugs import PLANTED
from workloads.moe_gpt.config import Config as MoeGptConfig
from workloads.moe_gpt.language import MoeLanguageModel


class MoeGpt(MoeLanguageModel):
    """Trials that differ in any scalar but the seed share batches and initial weights."""

    Config = MoeGptConfig

    def run(self, config: Any, context: Context) -> Iterator[Report]:
        planted = PLANTED.get(config.bug)
        return super().run(config, context) if planted is None else planted().run(config, context)

    def check(self, config: Any, context: Context) -> Iterator[Finding]:
        planted = PLANTED.get(config.bug)
        return super().check(config, context) if planted is None else planted().check(config, context)
