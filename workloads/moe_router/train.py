"""What the training loop needs of `moe_router`: its rows, its model, its loss and what is seen of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from orchestrator.workload import Context
from workloads.engine.optimizers import Groups, decay_groups
from workloads.engine.precision import POLICIES
from workloads.engine.random import generator
from workloads.engine.training import TrainingWorkload
from workloads.engine.update import Blocks, Call, Hyper, Update
from workloads.layers.router import Routing, expert_load
from workloads.layers.router_metrics import router_metrics, to_floats
from workloads.moe_router.config import METRICS
from workloads.moe_router.config import Config as MoeConfig
from workloads.moe_router.model import MoeRegression, Seen, moe_loss
from workloads.moe_router.observe import evaluate
from workloads.moe_router.task import NUM_TEST, NUM_TRAIN, Batch, draw_task
from workloads.probes.catalogue import Thresholds
from workloads.probes.memory import memory_probes
from workloads.probes.probe import Probe
from workloads.probes.router import RouterProbe


@dataclass(frozen=True)
class Rows:
    """The training rows and the held-out rows: one task, two independent streams of the trial."""

    training: Batch
    held_out: Batch

    @property
    def num_rows(self) -> int:
        return self.training.num_valid

    def batch(self, indices_B: Tensor, noise: int) -> Batch:
        return self.training.rows(indices_B.to(self.training.inputs_NI.device))

    def split_rows(self) -> tuple[Tensor, Tensor]:
        return self.training.inputs_NI, self.held_out.inputs_NI

    def to(self, device: str) -> Rows:
        return Rows(self.training.to(device), self.held_out.to(device))


class MoeRouter(TrainingWorkload):
    """Trials that differ in any scalar but the seed share data, batch order and initial weights."""

    Config = MoeConfig
    metrics = METRICS

    def data(self, config: MoeConfig, context: Context) -> Rows:
        task = draw_task(config.task_seed, config.spread, config.task_scale, config.noise)
        training = task.draw(NUM_TRAIN, generator(context, "data"))
        return Rows(training, task.draw(NUM_TEST, generator(context, "eval")))

    def build(self, config: MoeConfig, data: Rows, source: torch.Generator) -> MoeRegression:
        return MoeRegression(config, source)

    def loss(self, call: Call, batch: Batch, hyper: Hyper) -> tuple[Tensor, Seen]:
        return moe_loss(call, batch, hyper)

    def blocks(self, model: nn.Module) -> Blocks:
        assert isinstance(model, MoeRegression)
        return model.blocks()

    def parameter_groups(self, config: MoeConfig, model: nn.Module) -> Groups:
        """The learnable correction of the offset has a learning rate of its own."""
        named = dict(model.named_parameters())
        offset = named.pop("moe.router.offset", None)
        groups = decay_groups(named.items(), config.weight_decay)
        return (
            groups if offset is None else [*groups, {"params": [offset], "lr": config.offset_lr, "weight_decay": 0.0}]
        )

    def hyper(self, config: MoeConfig, step: int) -> Hyper:
        """The drift makes the offset depend on the step."""
        return {"alpha": config.alpha, "c_z": config.c_z, "offset": config.router_offset + config.offset_drift * step}

    def prepare(self, call: Call, window: Sequence[Batch], hyper: Hyper) -> Hyper:
        """The load of the whole window, which the balance loss of each micro-batch refers to.

        It costs a forward pass more, and only where the window has several micro-batches.
        """
        if len(window) == 1 or hyper["alpha"] == 0:
            return hyper
        with torch.no_grad():
            routings = [call(micro.inputs_NI, hyper["offset"])[1] for micro in window]
        loads = [expert_load(routing.experts_BK, routing.logits_BE.shape[-1]) for routing in routings]
        return {**hyper, "load_E": torch.stack(loads).sum(0)}

    def probes(self, config: MoeConfig, model: nn.Module, thresholds: Thresholds) -> list[Probe]:
        router = RouterProbe(thresholds, POLICIES[config.precision], config.k, config.num_experts, parts_of)
        return [*super().probes(config, model, thresholds), router, *memory_probes(config, thresholds, model)]

    def observe(self, config: MoeConfig, update: Update) -> dict[str, float]:
        mse = sum(share * seen.mse.detach() for share, seen in update.seen)
        routings = [seen.routing for _, seen in update.seen]
        return {"train/mse": float(mse), **to_floats(router_metrics(routings))}

    def evaluate(self, config: MoeConfig, model: nn.Module, data: Rows, hyper: Hyper) -> dict[str, float]:
        assert isinstance(model, MoeRegression)
        return evaluate(model, data.held_out, hyper["offset"])


def parts_of(seen: Seen) -> tuple[Tensor, list[Routing]]:
    """The task's loss, and the routing of the one layer."""
    return seen.mse.detach(), [seen.routing]
