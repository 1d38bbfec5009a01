"""What the probes cost: training with all of them against the same training without any, at the default log_every.

Both train in this process on one thread, in turns of ten steps that end in a report; compared is CPU time. The tiny
model has steps of about a millisecond: there the fixed cost of a probe weighs most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.turns import STEPS_PER_TURN, cpu_seconds, turn_of
from workloads.char_gpt.config import Config as CharConfig
from workloads.char_gpt.train import CharGpt
from workloads.engine.alone import Alone
from workloads.engine.training import Training, TrainingWorkload
from workloads.moe_gpt.config import Config as MoeGptConfig
from workloads.moe_gpt.train import MoeGpt
from workloads.moe_router.config import Config as RouterConfig
from workloads.moe_router.train import MoeRouter
from workloads.probes.catalogue import Thresholds
from workloads.probes.probe import Probe

Line = tuple[str, float, str, str, bool | None]

NUM_TURNS = 31
SHORT_STEP_MS = 5.0  # below it turns are cheap, and a few per cent of them drown in noise
MORE_TURNS = 10  # times
CEILING = 1.05

LONG: dict[str, Any] = {"steps": 10**9, "eval_every": 10**9}
CASES: dict[str, tuple[type[TrainingWorkload], Any]] = {
    "char_gpt": (CharGpt, CharConfig(**LONG)),
    "moe_gpt": (MoeGpt, MoeGptConfig(**LONG)),
    "moe_router": (MoeRouter, RouterConfig(**LONG)),
    "a tiny char_gpt": (CharGpt, CharConfig(**LONG, depth=1, width=16, context=16, batch_size=4)),
}


def unwatched(kind: type[TrainingWorkload]) -> TrainingWorkload:
    class Unwatched(kind):  # type: ignore[misc, valid-type]
        def probes(self, config: Any, model: nn.Module, thresholds: Thresholds) -> list[Probe]:
            return []

    return Unwatched()


def loop(workload: TrainingWorkload, config: Any) -> Callable[[], None]:
    return turn_of(Training.begin(workload, config, Alone(log_every=STEPS_PER_TURN)))


def in_turn(watched: Callable[[], None], plain: Callable[[], None], plain_first: bool) -> tuple[float, float]:
    """CPU seconds of both; who comes second finds the caches warm, so they take turns at that too."""
    if plain_first:
        theirs = cpu_seconds(plain)
        return cpu_seconds(watched), theirs
    return cpu_seconds(watched), cpu_seconds(plain)


def run(num_turns: int = NUM_TURNS) -> Iterator[Line]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, (kind, config) in CASES.items():
            watched, plain = loop(kind(), config), loop(unwatched(kind), config)
            for turn in (watched, plain):
                turn()  # the first two steps are looked at thoroughly
            is_short = 1000 * cpu_seconds(plain) / STEPS_PER_TURN < SHORT_STEP_MS
            count = num_turns * (MORE_TURNS if is_short else 1)
            pairs = [in_turn(watched, plain, plain_first=bool(turn % 2)) for turn in range(count)]
            ratio = median(ours / theirs for ours, theirs in pairs)
            step_ms = 1000 * median(theirs for _, theirs in pairs) / STEPS_PER_TURN
            yield f"{name}, {step_ms:.1f} ms a step: watched / unwatched", ratio, "x", f"<= {CEILING}", ratio <= CEILING
    finally:
        torch.set_num_threads(threads)
