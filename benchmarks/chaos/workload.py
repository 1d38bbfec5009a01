"""char_gpt that keeps a witness: a file of its own that says which reports were promised to be safe. Judges nothing."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from benchmarks.chaos.audit import CHECK_NAME, MARK_EVERY
from orchestrator.trial import Finding, Report, Severity
from orchestrator.workload import Checkpoint, Context
from workloads.char_gpt.config import Config as CharConfig
from workloads.char_gpt.train import CharGpt


class Witnessed(CharGpt):
    """char_gpt, slowed down to the pace of a real training, with findings at known steps."""

    class Config(CharConfig):
        witness: str = Field("", description="folder of the witness' files; empty: there is none")
        pause_s: float = Field(0.0, ge=0, description="of sleep a step")

    checks = (*CharGpt.checks, CHECK_NAME)

    def run(self, config: Config, context: Context) -> Iterator[Report]:
        witness = Witness(context, Path(config.witness) if config.witness else None)
        for report in super().run(config, witness):
            time.sleep(config.pause_s)
            witness.heard.append(report)
            if report.step % MARK_EVERY == 0:
                context.finding(Finding(CHECK_NAME, Severity.INFO, f"step {report.step} is done", "", report.step))
            yield report


class Witness:
    """The trial's context; a state is kept only after all reports before it are safe, so those are then promised."""

    def __init__(self, context: Context, folder: Path | None) -> None:
        self._context, self._folder = context, folder
        self.heard: list[Report] = []
        self.checkpoint: Any = WitnessedCheckpoint(context.checkpoint, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def attest(self) -> None:
        """Writes down what was promised, safe on disk when this returns."""
        promised, self.heard = self.heard, []
        if self._folder is None:
            return
        who = {"trial": self._context.trial, "attempt": self._context.attempt}
        lines = [
            json.dumps({**who, "step": one.step, "measured_at": one.measured_at, "loss": one.metrics["train/loss"]})
            for one in promised
        ]
        path = self._folder / f"{self._context.trial}.{self._context.attempt}.{os.getpid()}.jsonl"
        with path.open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())


class WitnessedCheckpoint:
    """The trial's checkpoint."""

    def __init__(self, checkpoint: Checkpoint, witness: Witness) -> None:
        self._checkpoint, self._witness = checkpoint, witness

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)

    def save(self, step: int, state: bytes) -> None:
        self._checkpoint.save(step, state)
        self._witness.attest()
