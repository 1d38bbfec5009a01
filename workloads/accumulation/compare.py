"""Trains the accumulated run and its combined twin side by side and says how far apart they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.trial import Report
from orchestrator.workload import Context
from workloads.accumulation.config import METRICS, Config
from workloads.accumulation.deviations import trainer_class
from workloads.accumulation.network import Network, cross_entropy, draw_windows, join
from workloads.engine.precision import POLICIES, Precision, loss_scaler
from workloads.engine.random import generator
from workloads.engine.update import Batch, Trainer, gradient_norms

EXACT = Precision(torch.float64, torch.float64, torch.float64)
LEARNING_RATE = 1.0  # so that the change of one update is the gradient itself


@dataclass
class Run:
    """A network in training, and what happened to it."""

    network: Network
    trainer: Trainer
    num_updates: int = 0
    num_skipped: int = 0
    norm: float = 0.0
    pending: float = 0.0
    start_P: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.start_P = self.weights()

    def weights(self) -> Tensor:
        """All weights in one row, float64."""
        return nn.utils.parameters_to_vector(self.network.parameters()).detach().double()

    def change(self) -> Tensor:
        return self.weights() - self.start_P

    def apply(self, window: Sequence[Batch]) -> None:
        update = self.trainer.update(window, {})
        self.norm = update.norms["total"]
        self.num_updates += update.applied
        self.num_skipped += not update.applied

    def leave(self, window: Sequence[Batch]) -> None:
        """Accumulates the window's gradient and forgets to apply it, as a loop does that steps at every K-th only."""
        self.trainer.clear_gradients()
        self.trainer.accumulate(window, {})
        self.norm = self.pending = gradient_norms(self.trainer.blocks)["total"] / self.trainer.scaler.get_scale()


def start(config: Config, context: Context, precision: str, kind: type[Trainer]) -> Run:
    """A run from the trial's initial weights. The rate falls linearly over the windows and would end at 0."""
    policy = EXACT if precision == "fp64" else POLICIES[precision]
    network = Network(config.norm_layer, policy, generator(context, "init"))
    if precision == "fp64":
        network.double()
    optimizer = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE)
    num_windows = len(config.windows)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: max(0.0, 1 - count / num_windows))
    blocks = {"all": list(network.parameters())}
    scaler = loss_scaler(policy, "cpu")
    return Run(network, kind(network, cross_entropy, blocks, optimizer, scaler, config.clip_norm, [schedule]))


def measure(run: Run, combined: Run) -> dict[str, float]:
    metrics = {
        **compare_changes(run.change(), combined.change()),
        "max_abs_diff": (run.weights() - combined.weights()).abs().max().item(),
        "grad/preclip/total": run.norm,
        "combined/grad/preclip/total": combined.norm,
        "num_updates": run.num_updates,
        "num_scheduler_steps": run.trainer.schedules[0].last_epoch,
        "pending_gradient": run.pending,
        "update/skipped_steps": run.num_skipped,
        **{f"weight/{place}": value for place, value in enumerate(run.weights()[:3].tolist())},
    }
    if run.trainer.scaler.is_enabled():
        metrics["scaler/scale"] = run.trainer.scaler.get_scale()
    return {**metrics, **measure_norm(run.network.norm, combined.network.norm)}


def compare_changes(ours_P: Tensor, theirs_P: Tensor) -> dict[str, float]:
    """Nothing as long as the combined run has not changed: 0/0 as the sweep's metric would pass for a divergence."""
    theirs = theirs_P.norm().item()
    if theirs == 0:
        return {}
    return {
        "relative_diff": (ours_P - theirs_P).norm().item() / theirs,
        "change_ratio": ours_P.norm().item() / theirs,
        "cosine": torch.cosine_similarity(ours_P, theirs_P, dim=0).item(),
    }


def measure_norm(ours: nn.Module, theirs: nn.Module) -> dict[str, float]:
    """What a batch norm has seen; nothing where there is none."""
    if not isinstance(ours, nn.BatchNorm1d):
        return {}
    buffers, others = dict(ours.named_buffers()), dict(theirs.named_buffers())
    return {
        "norm/running_var_diff": (buffers["running_var"] - others["running_var"]).abs().max().item(),
        "norm/num_batches_tracked": buffers["num_batches_tracked"].item(),
    }


class Accumulation:
    """Trials of one seed start from the same weights; those with windows of as many examples see the same ones."""

    Config = Config
    metrics = METRICS

    def run(self, config: Any, context: Context) -> Iterator[Report]:
        """Trains by a `Config`; reports at the asked windows and at the last one."""
        run = start(config, context, config.precision, trainer_class(config))
        combined = start(config, context, "fp32" if config.precision == "fp16" else config.precision, Trainer)
        windows = draw_windows(config, context)
        for step, window in enumerate(windows, 1):
            if context.stopping:
                return
            if config.last_window == "drop" and len(window) < len(config.window_sizes):
                run.leave(window)
            else:
                run.apply(window)
            combined.apply([join(window)])
            if context.should_report(step) or step == len(windows):
                yield Report(step, measure(run, combined))
