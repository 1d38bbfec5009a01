"""Small workloads for tests and benchmarks: no torch, every oddity on demand.

Those that say `vars(config)` thereby read all of it: the tests that sweep their fields are about something else.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import BaseModel, Field, create_model, model_validator

from orchestrator.trial import Finding, Report, Severity
from orchestrator.workload import Context, FieldConflict, WorkloadConfig, fusible, size


class Trivial:
    """Reports five numbers a step and does nothing else."""

    class Config(WorkloadConfig):
        x: float = fusible(0.0)
        k: int = 1
        steps: int = 10
        seed: int = 0
        sleep_s: float = 0.0
        hold: str = ""  # a file that the third trial and later ones wait for

    metrics = ("train/loss", "val/loss", "a", "b", "c")

    def run(self, config: Config, context: Context) -> Iterator[Report]:
        vars(config)
        for step in range(1, config.steps + 1):
            time.sleep(config.sleep_s)
            while config.hold and context.trial > 1 and not Path(config.hold).exists() and not context.stopping:
                time.sleep(0.02)
            loss = (config.x - 1) ** 2 + 1 / step + config.k / 100
            if context.should_report(step) or step == config.steps:
                yield Report(step, {"train/loss": loss, "val/loss": loss, "a": step, "b": -step, "c": math.sin(step)})
            if context.stopping:
                return


class Whole(Trivial):
    """Refuses fractions of `x`, which only a draw from inside a range has."""

    class Config(Trivial.Config):
        @model_validator(mode="after")
        def _check(self) -> Whole.Config:
            if self.x % 1:
                raise FieldConflict("x", f"x={self.x} is no whole number")
            return self


class Nested(BaseModel):
    lr: float = 0.1
    wd: float = 0.01


class Speechless(RuntimeError):
    def __str__(self) -> str:
        raise BaseException("no words")


# What no `except Exception` catches, and what cannot say what it is.
WORST: dict[str, Callable[[], BaseException]] = {
    "interrupt": KeyboardInterrupt,
    "generator_exit": GeneratorExit,
    "base": functools.partial(BaseException, "of its own"),
    "speechless": Speechless,
    "endless": lambda: ValueError("begin " + "x" * 100_000 + " end"),
}


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
        vars(config)
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
        if config.do in WORST:
            raise WORST[config.do]()
        if config.do == "close_stdout":
            sys.stdout.close()
            print("said by the deaf")
        if config.do == "raise":
            raise RuntimeError("a planted failure")
        if config.do == "leak":
            words = Path(config.file).read_text()
            print(words.splitlines()[0], file=sys.stderr)
            raise ConnectionError(f"cannot connect to {words}")
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
        if config.do == "seize":  # no other thread of Python's runs meanwhile
            ctypes.PyDLL(None).sleep(3600)
        if config.do == "artifact":
            path = Path(f"/tmp/orch-lab-{os.getpid()}.bin")
            path.write_bytes(b"weights")
            context.artifact(path, "checkpoints/last.bin")
            path.unlink()
            return {**metrics, "val/loss": math.nan}
        if config.do == "finding":
            step, value = np.int64(2), np.float32(math.nan)  # as workloads have them
            context.finding(Finding("planted", Severity.ERROR, "seen", "do something", step, value))  # type: ignore[arg-type]
        return metrics


class Witness:
    """Tells where and how it runs, and dies on its first attempt when asked to."""

    class Config(WorkloadConfig):
        seed: int = 0
        sleep_s: float = 0.1
        die_on_attempt: int = 0

    metrics = ("pid", "niceness", "threads", "torch_imported", "num_gpus", "gpu", "began", "ended", "attempt")

    def run(self, config: Config, context: Context) -> Iterator[Report]:
        vars(config)
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


class Brittle:
    """Dies on nodes whose environment says so; elsewhere it lasts until that has happened three times."""

    class Config(WorkloadConfig):
        graves: str
        seed: int = 0

    metrics = ("num_graves",)

    def run(self, config: Config, context: Context) -> Iterator[Report]:
        vars(config)
        if os.environ.get("ORCH_LAB_BAD_NODE"):
            Path(config.graves, str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while (num_graves := len(list(Path(config.graves).iterdir()))) < 3 and not context.stopping:
            time.sleep(0.02)
        yield Report(1, {"num_graves": num_graves})


class Hungry:
    """Asks for more memory than its process may have, as many times as told; says where and when it ran."""

    class Config(WorkloadConfig):
        times: int = 0
        sleep_s: float = 0.0
        seed: int = 0

    metrics = ("pid", "began", "ended")

    def run(self, config: Config, context: Context) -> Iterator[Report]:
        vars(config)
        began = time.time()
        time.sleep(config.sleep_s)
        if context.attempt <= config.times:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + 2**29
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
            bytearray(2**30)
        yield Report(1, {"pid": os.getpid(), "began": began, "ended": time.time()})


class Counter:
    """Counts to `steps`, goes on from a saved count, and is killed at a step of its first attempt when asked to."""

    class Config(WorkloadConfig):
        steps: int = 100
        sleep_s: float = 0.0
        die_at: int = 0
        raise_at: int = 0
        cure: str = ""  # a file; once it is there nothing is raised
        seed: int = 0

    metrics = ("train/loss", "count")

    def run(self, config: Config, context: Context) -> Iterator[Report]:
        vars(config)
        saved = context.checkpoint.load()
        count = int(saved) if saved else 0
        while count < config.steps:
            if context.stopping:
                context.checkpoint.save(count, str(count).encode())
                return
            time.sleep(config.sleep_s)
            count += 1
            if count == config.raise_at and not (config.cure and Path(config.cure).exists()):
                raise RuntimeError(f"a planted failure at {count} in /tmp/{context.trial}")
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
        vars(config)
        yield Report(1, {"loss": 1.0})


class Checked:
    """Has checks: they see the planted `bug`, die, hang or chat when asked to."""

    class Config(WorkloadConfig):
        bug: str = "none"
        k: int = 1
        rows: int = size(4)
        x: float = fusible(0.0)
        pid_file: str = ""
        seed: int = 0

    metrics = ("loss",)

    def run(self, config: Config, context: Context) -> Iterator[Report]:
        vars(config)
        if config.bug in ("factor", "late"):
            context.finding(Finding("loss_factor", Severity.ERROR, "40 times the loss", "divide", 3, 40.0, 0.01))
        yield Report(1, {"loss": config.x + 1})

    def check(self, config: Config, context: Context) -> Iterator[Finding]:
        print("a workload may say something")
        if config.pid_file:
            Path(config.pid_file).write_text(str(os.getpid()))
        if config.bug == "factor":
            assert context.device == "cpu"
            yield Finding(
                "loss_factor",
                Severity.ERROR,
                f"the gradient is {40 * config.k} times as long",
                "divide",
                None,
                40.0,
                0.01,
            )
        if config.bug == "tied":
            context.finding(Finding("router_ties", Severity.WARNING, "every second token", value=np.float32(0.5)))  # type: ignore[arg-type]
        if config.bug == "raise":
            raise RuntimeError("a planted failure")
        if config.bug == "far":
            yield Finding("loss_factor", Severity.ERROR, "in a future that no column holds", step=10**30)
        if config.bug == "text":
            yield "a bug"  # type: ignore[misc]
        if config.bug == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if config.bug == "hang":
            time.sleep(3600)


class Watched:
    """Finds what it is told to find at a step, and says which of its fields it reads: all but `idle`."""

    class Config(WorkloadConfig):
        steps: int = 6
        find: str = ""  # a check's name
        severity: str = "error"
        at: int = 2
        nan_at: int = 0
        die_at: int = 0
        factor: float = 1.0
        idle: int = 0
        late: int = 0  # read in attempts that begin at the start only
        seed: int = 0
        sleep_s: float = 0.0

    metrics = ("train/loss",)
    checks = ("loss_spike", "router_collapsed")
    thresholds: ClassVar = {"spike_sigmas": 6.0, "limit": 0.5}

    def run(self, config: Config, context: Context) -> Iterator[Report]:
        saved = context.checkpoint.load()
        begin = int(saved) if saved else config.late * 0
        noise = context.generator("noise").random()
        for step in range(begin + 1, config.steps + 1):
            time.sleep(config.sleep_s)
            if config.find and step == config.at:
                message = f"seen\nwith limit {context.thresholds.get('limit', self.thresholds['limit'])}"
                context.finding(Finding(config.find, Severity(config.severity), message, "look", step, 1.0, 0.5))
            if context.should_report(step) or step == config.steps:
                loss = math.nan if step == config.nan_at else config.factor / step + noise * 0
                yield Report(step, {"train/loss": loss})
            if context.checkpoint.due(step):
                context.checkpoint.save(step, str(step).encode())
            if step == config.die_at and context.attempt == 1:
                os.kill(os.getpid(), signal.SIGKILL)


class Talker:
    """Prints in every way there is, and waits for the file `until`; `fail` ends it with an exception."""

    class Config(WorkloadConfig):
        x: float = fusible(0.0)
        steps: int = 2
        until: str = ""
        fail: bool = False

    metrics = ("val/loss",)

    def run(self, config: Config, context: Context) -> Iterator[Report]:
        vars(config)
        logging.basicConfig()
        print("one\ntwo", end="\n\n")
        print("three", file=sys.stderr)
        logging.getLogger("talker").warning("x is %g", config.x)
        warnings.warn(f"x={config.x:g} is no number of mine", stacklevel=1)
        print("\x1b[31mred\x1b[0m postgresql://me:sesame@host/db")
        for step in range(1, config.steps + 1):
            print(f"\rstep {step}/{config.steps}", end="")
            yield Report(step, {"val/loss": config.x + 1 / step})
        print()
        while config.until and not Path(config.until).exists() and not context.stopping:
            time.sleep(0.02)
        if config.fail:
            raise ValueError("a planted failure")
        print("the end", end="")
