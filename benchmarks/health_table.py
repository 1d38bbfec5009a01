"""Plants every bug in every workload that has it and writes down who named it: `make health-table`.

For each bug and seed: the probe that named it and at which update, the check that named it before training, and what
both said of the healthy twin, which differs in nothing but the bug. The table goes into docs/health.md. The sizes are
the smallest that leave every bug to be seen: the tests go through all of it again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from orchestrator.trial import Finding, Severity
from workloads.char_gpt.config import Config as CharConfig
from workloads.char_gpt.train import CharGpt
from workloads.engine.alone import Alone
from workloads.engine.training import TrainingWorkload
from workloads.moe_gpt.config import Config as MoeConfig
from workloads.moe_gpt.train import MoeGpt

SEEDS = (0, 1, 2, 3, 4)
STEPS = 24  # a parameter that never receives a gradient is believed after 20
FEW_STEPS = 10  # for bugs that show at once; the warm-up is as long
TWIN_STEPS = 200  # of a healthy run, in which everything else may go wrong too
DOCUMENT = Path(__file__).parents[1] / "docs" / "health.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"

Settings = tuple[tuple[str, Any], ...]  # hashable

TINY = {"batch_size": 4, "width": 8, "context": 16, "depth": 1, "heads": 2, "num_held_out_windows": 8}
TEXT = {"text": f"file:{argparse.__file__}"}  # any of 10^5 characters: the default has four times as many
COMMON = {**TINY, **TEXT, "accumulation_steps": 2, "padding": 0.5, "warmup_steps": 10, "lr": 1e-3}
WORKLOADS: Mapping[str, tuple[Callable[[], TrainingWorkload], type[CharConfig], Mapping[str, Any]]] = {
    "char_gpt": (CharGpt, CharConfig, COMMON),
    # Under the default alpha of 0.01 a router of width 8 collapses now and then, and the probe is right to say so.
    "moe_gpt": (MoeGpt, MoeConfig, {**COMMON, "num_experts": 4, "c_z": 0.01, "alpha": 0.1}),
}

NEEDS: Mapping[str, Mapping[str, Any]] = {
    "clip_before_unscale": {"precision": "fp16", "clip_norm": 0.1},
    "renormalized_top1": {"k": 1},
}
"""What a bug needs beyond the common settings to show itself; its twin has it too."""

NAMED_BY: Mapping[str, tuple[str, ...]] = {
    "no_zero_grad": ("gradients_not_cleared",),
    "unshifted_targets": ("targets_not_shifted",),
    "loss_times_40": ("loss_factor",),
    "detached_positions": ("no_gradient",),
    "clip_before_unscale": ("clip_order",),
    "unscaled_accumulation": ("accumulation_weights",),
    "mean_of_means": ("accumulation_weights",),
    "scheduler_per_micro_batch": ("schedule_pace",),
    "bf16_router": ("router_dtype",),
    "renormalized_top1": ("dead_router",),
    "double_counted_load": ("load_count", "auxiliary_loss"),
    "padding_in_z": ("auxiliary_loss", "padding_counts"),
}
"""The right names for each bug."""

ROUTER_BUGS = ("bf16_router", "renormalized_top1", "double_counted_load", "padding_in_z")
CASES = [(name, bug) for name in WORKLOADS for bug in NAMED_BY if name == "moe_gpt" or bug not in ROUTER_BUGS]


@dataclass(frozen=True)
class Verdict:
    """What was said of one run: errors and warnings by check, with the first step of each."""

    alarms: Mapping[str, int | None]

    @classmethod
    def of(cls, findings: Sequence[Finding]) -> Verdict:
        alarms: dict[str, int | None] = {}
        for finding in findings:
            if finding.severity is not Severity.INFO:
                alarms.setdefault(finding.check_name, finding.step)
        return cls(alarms)

    def names(self, bug: str) -> bool:
        return any(check in self.alarms for check in NAMED_BY[bug])

    def step(self, bug: str) -> int | None:
        return min((self.alarms[check] or 0 for check in NAMED_BY[bug] if check in self.alarms), default=None)


def steps_of(bug: str) -> int:
    return STEPS if bug == "detached_positions" else FEW_STEPS


def settings_of(bug: str) -> Settings:
    return tuple(NEEDS.get(bug, {}).items())


@cache
def trained(workload: str, bug: str, needs: Settings, seed: int, steps: int) -> Verdict:
    """What the probes say of a run."""
    kind, config, common = WORKLOADS[workload]
    context = Alone(seed)
    for _ in kind().run(config(**{**common, **dict(needs)}, steps=steps, seed=seed, bug=bug), context):
        pass
    return Verdict.of(context.findings)


@cache
def checked(workload: str, bug: str, needs: Settings, seed: int) -> Verdict:
    """What the checks say before it."""
    kind, config, common = WORKLOADS[workload]
    return Verdict.of(list(kind().check(config(**{**common, **dict(needs)}, seed=seed, bug=bug), Alone(seed))))


@dataclass(frozen=True)
class Row:
    workload: str
    bug: str
    probes: Sequence[Verdict]  # by seed
    checks: Sequence[Verdict]
    twins: Sequence[Verdict]

    @property
    def is_right(self) -> bool:
        named = all(verdict.names(self.bug) for verdict in (*self.probes, *self.checks))
        return named and not any(verdict.alarms for verdict in self.twins)

    def cells(self) -> list[str]:
        steps = [verdict.step(self.bug) for verdict in self.probes]
        known = [step for step in steps if step is not None]
        at = f"{min(known)}" if len(set(known)) == 1 else f"{min(known)} to {max(known)}" if known else "-"
        alarms = sorted({name for verdict in self.twins for name in verdict.alarms})
        return [
            self.bug,
            self.workload,
            f"{_named(self.probes, self.bug)} ({len(known)}/{len(steps)})",
            at,
            f"{_named(self.checks, self.bug)} ({sum(v.names(self.bug) for v in self.checks)}/{len(self.checks)})",
            ", ".join(alarms) or "nothing",
        ]


def _named(verdicts: Sequence[Verdict], bug: str) -> str:
    return ", ".join(check for check in NAMED_BY[bug] if any(check in verdict.alarms for verdict in verdicts)) or "-"


def row(workload: str, bug: str, seeds: Sequence[int] = SEEDS, twin_steps: int = TWIN_STEPS) -> Row:
    needs = settings_of(bug)
    probes = [trained(workload, bug, needs, seed, steps_of(bug)) for seed in seeds]
    checks = [checked(workload, bug, needs, seed) for seed in seeds]
    twins = [trained(workload, "none", needs, seed, twin_steps) for seed in seeds]
    return Row(workload, bug, probes, checks, [*twins, *(checked(workload, "none", needs, seed) for seed in seeds)])


def table(rows: Sequence[Row]) -> Iterator[str]:
    yield "| planted bug | workload | probe (seeds) | at update | check before training (seeds) | its healthy twin |"
    yield "|---|---|---|---|---|---|"
    for one in rows:
        yield "| " + " | ".join(one.cells()) + " |"


def main() -> int:
    torch.set_num_threads(1)
    rows = []
    for workload, bug in CASES:
        rows.append(row(workload, bug))
        print(*rows[-1].cells(), sep="  ", flush=True)
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    DOCUMENT.write_text("\n".join([before + BEGIN, *table(rows), END + after]))
    wrong = [f"{one.bug} in {one.workload}" for one in rows if not one.is_right]
    print(
        f"{len(rows) - len(wrong)} of {len(rows)} named on {len(SEEDS)} seeds, healthy twins silent", *wrong, sep="\n"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
