"""Small workloads for tests and benchmarks: no torch, every oddity on demand."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from pydantic import BaseModel, Field, create_model

from orchestrator.trial import Finding, Report, Severity
from orchestrator.workload import Context, WorkloadConfig, fusible


class Trivial:
    """Reports five numbers a step and does nothing else."""

    class Config(WorkloadConfig):
        x: float = fusible(0.0)
        k: int = 1
        steps: int = 10
        seed: int = 0
        sleep_s: float = 0.0

    metrics = ("train/loss", "val/loss", "a", "b", "c")

    def run(self, config: Config, context: Context) -> Iterator[Report]:
        for step in range(1, config.steps + 1):
            time.sleep(config.sleep_s)
            loss = (config.x - 1) ** 2 + 1 / step + config.k / 100
            if context.should_report(step) or step == config.steps:
                yield Report(step, {"train/loss": loss, "val/loss": loss, "a": step, "b": -step, "c": math.sin(step)})
            if context.stopping:
                return


class Nested(BaseModel):
    lr: float = 0.1
    wd: float = 0.01


class Odd:
    """Does the odd thing that `do` names at step 2."""

    class Config(WorkloadConfig):
        do: str = "nothing"
        steps: int = 4
        seed: int = 0
        note: str = ""
        file: str = ""
        hidden: list[int] = Field(default_factory=lambda: [1])
        opt: Nested = Nested()
        x: float = fusible(1.0)
        sleep_s: float = 0.0

    metrics = ("train/loss", "val/loss", "load/*")

    def run(self, config: Config, context: Context) -> Iterator[Report]:
        for step in range(1, config.steps + 1):
            time.sleep(config.sleep_s)
            metrics = {"train/loss": 1 / step, "val/loss": config.x / step}
            if step == 2:
                metrics = self._odd(config, context, metrics)
            if config.do == "again" and step == config.steps:
                yield Report(step, {"val/loss": 0.9})
                yield Report(step, {"val/loss": 0.1})
                continue
            if config.do == "huge_step":
                yield Report(2**64, metrics)
            if config.do == "numpy_step":
                yield Report(np.int64(step), metrics)  # type: ignore[arg-type]
                continue
            if config.do == "silent":
                metrics = {"train/loss": 1 / step, "other": 1.0}
            yield Report(step, metrics)
            if context.stopping:
                return

    def _odd(self, config: Config, context: Context, metrics: dict[str, float]) -> dict[str, float]:
        if config.do == "nul":
            raise ValueError("bad \0 byte")
        if config.do == "exit":
            sys.exit(0)
        if config.do == "raise":
            raise RuntimeError("a planted failure")
        if config.do == "need_file" and not Path(config.file).exists():
            raise FileNotFoundError(config.file)
        if config.do in ("nan", "inf", "-inf"):
            return {**metrics, "val/loss": float(config.do)}
        if config.do == "none":
            return {**metrics, "val/loss": None}  # type: ignore[dict-item]
        if config.do == "odd_names":
            return {**metrics, "load[e0]": 1.0, "time(s)": 2.0, "acc@1": 3.0, "a//b": 4.0, "/x": 5.0}
        if config.do == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if config.do == "hang":
            time.sleep(3600)
        if config.do == "artifact":
            path = Path(f"/tmp/orch-lab-{os.getpid()}.bin")
            path.write_bytes(b"weights")
            context.artifact(path, "checkpoints/last.bin")
            path.unlink()
            return {**metrics, "val/loss": math.nan}
        if config.do == "finding":
            context.finding(Finding("planted", Severity.ERROR, "seen", "do something", step=2, value=math.nan))
        return metrics


class Witness:
    """Tells where and how it runs, and dies on its first attempt when asked to."""

    class Config(WorkloadConfig):
        seed: int = 0
        sleep_s: float = 0.1
        die_on_attempt: int = 0

    metrics = ("pid", "niceness", "threads", "torch_imported", "num_gpus", "gpu", "began", "ended", "attempt")

    def run(self, config: Config, context: Context) -> Iterator[Report]:
        began = time.time()
        if context.attempt == config.die_on_attempt:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(config.sleep_s)
        gpus = [index for index in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if index]
        yield Report(
            1,
            {
                "pid": os.getpid(),
                "niceness": os.nice(0),
                "threads": float(os.environ.get("OMP_NUM_THREADS", "nan")),
                "torch_imported": float("torch" in sys.modules),
                "num_gpus": len(gpus),
                "gpu": float(gpus[0]) if gpus else -1,
                "began": began,
                "ended": time.time(),
                "attempt": context.attempt,
            },
        )


class Counter:
    """Counts to `steps`, goes on from a saved count, and is killed at a step of its first attempt when asked to."""

    class Config(WorkloadConfig):
        steps: int = 100
        sleep_s: float = 0.0
        die_at: int = 0
        seed: int = 0

    metrics = ("train/loss", "count")

    def run(self, config: Config, context: Context) -> Iterator[Report]:
        saved = context.checkpoint.load()
        count = int(saved) if saved else 0
        while count < config.steps:
            if context.stopping:
                context.checkpoint.save(count, str(count).encode())
                return
            time.sleep(config.sleep_s)
            count += 1
            if context.should_report(count) or count == config.steps:
                yield Report(count, {"train/loss": 1 / count, "count": count})
            if context.checkpoint.due(count) and count < config.steps:
                context.checkpoint.save(count, str(count).encode())
            if count == config.die_at and context.attempt == 1:
                os.kill(os.getpid(), signal.SIGKILL)


class Wide:
    """Has fifty parameters and says one number."""

    Config = create_model(  # the forty-nine besides `seed` are called a00 to a48 and hold their number
        "Config", __base__=WorkloadConfig, seed=(int, 0), **{f"a{index:02d}": (int, index) for index in range(49)}
    )

    metrics = ("loss",)

    def run(self, config: BaseModel, context: Context) -> Iterator[Report]:
        yield Report(1, {"loss": 1.0})
