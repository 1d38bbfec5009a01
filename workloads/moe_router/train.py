"""Trains one `moe_router` trial and reports on it. Touches no global state: every random number has its own stream."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from orchestrator.trial import Finding, Report, Severity
from orchestrator.workload import Context
from workloads.engine.precision import POLICIES, loss_scaler
from workloads.engine.random import generator
from workloads.engine.update import Hyper, Trainer, Update
from workloads.moe_router.config import METRICS, Config
from workloads.moe_router.model import MoeRegression, moe_loss
from workloads.moe_router.observe import Tally, evaluate, router_metrics
from workloads.moe_router.task import NUM_TEST, NUM_TRAIN, Batch, draw_task


def train(config: Config, context: Context) -> Iterator[Report]:
    """Reports at the asked steps, at the last one, and at the first step that could not be used."""
    device = choose_device(config, context)
    training, held_out = draw_data(config, context, device)
    model = MoeRegression(config, generator(context, "init")).to(device)
    trainer = build_trainer(config, model, device)
    order = generator(context, "order")
    tally, healthy = Tally(), True
    for step in range(1, config.steps + 1):
        if context.stopping:
            return
        with tally.timed():
            hyper = hyper_at(config, step)
            update = trainer.update(draw_window(config, training, order), hyper)
        tally.add(update)
        first_trouble = healthy and not usable(update, trainer)
        healthy = healthy and not first_trouble
        if first_trouble:
            context.finding(describe_trouble(update, step))
        if first_trouble or context.should_report(step) or step == config.steps:
            measured = {**evaluate(model, held_out, hyper["offset"]), **router_metrics_of(update, config.k)}
            yield Report(step, {**update_metrics(update, trainer, tally), **measured})


def choose_device(config: Config, context: Context) -> str:
    """`auto` is the device the trial was given. Raises ValueError for a GPU that the trial was not given."""
    if config.device == "cuda" and context.device != "cuda":
        raise ValueError("device: cuda, but this trial was given no GPU; set resources.gpu above 0, or device: auto")
    return context.device if config.device == "auto" else config.device


def draw_data(config: Config, context: Context, device: str) -> tuple[Batch, Batch]:
    """The training rows and the held-out rows: one task, two independent streams of this trial."""
    task = draw_task(config.task_seed, config.spread, config.task_scale, config.noise)
    training = task.draw(NUM_TRAIN, generator(context, "data"))
    held_out = task.draw(NUM_TEST, generator(context, "eval"))
    return training.to(device), held_out.to(device)


def draw_window(config: Config, training: Batch, order: torch.Generator) -> list[Batch]:
    """The micro-batches of one update. The rows depend on their number only, not on how they are split."""
    indices = torch.randint(NUM_TRAIN, (config.batch_size * config.accumulation_steps,), generator=order)
    return [training.rows(part.to(training.inputs_NI.device)) for part in torch.split(indices, config.batch_size)]


def build_trainer(config: Config, model: MoeRegression, device: str) -> Trainer:
    offset = model.moe.router.offset
    groups = [{"params": [parameter for parameter in model.parameters() if parameter is not offset]}]
    if offset is not None:
        groups.append({"params": [offset], "lr": config.offset_lr})  # type: ignore[dict-item]
    return Trainer(
        call=model,
        loss=moe_loss,
        blocks=model.blocks(),
        optimizer=torch.optim.Adam(groups, lr=config.lr, fused=True),
        scaler=loss_scaler(POLICIES[config.precision], device),
        clip_norm=config.clip_norm,
    )


def hyper_at(config: Config, step: int) -> Hyper:
    """The loss's scalars at a step; the drift makes the offset depend on it."""
    return {"alpha": config.alpha, "c_z": config.c_z, "offset": config.router_offset + config.offset_drift * step}


def usable(update: Update, trainer: Trainer) -> bool:
    """False when training cannot be trusted from here on. A step skipped by the loss scaler is business as usual."""
    skipped = not update.applied and not trainer.scaler.is_enabled()
    return not skipped and update.num_nonfinite_parameters == 0


def describe_trouble(update: Update, step: int) -> Finding:
    if update.num_nonfinite_parameters:
        message = f"{update.num_nonfinite_parameters} parameter values are not finite after this update"
    else:
        message = f"the gradient's norm is {update.norms['total']}; the update was not applied"
    return Finding("nonfinite_update", Severity.ERROR, message, "lower lr, set clip_norm, or raise c_z", step)


def router_metrics_of(update: Update, k: int) -> dict[str, float]:
    return router_metrics([seen.routing for _, seen in update.seen], k)


def update_metrics(update: Update, trainer: Trainer, tally: Tally) -> dict[str, float]:
    """Loss, norms and counts. An unusable update has no loss: NaN, which the orchestrator calls diverged."""
    metrics = {
        "train/loss": float(update.loss) if usable(update, trainer) else math.nan,
        "train/mse": float(sum(share * seen.mse.detach() for share, seen in update.seen)),
        "params/nonfinite": float(update.num_nonfinite_parameters),
        **{f"grad/preclip/{name}": norm for name, norm in update.norms.items()},
        **tally.take(),
    }
    if trainer.scaler.is_enabled():
        metrics["scaler/scale"] = trainer.scaler.get_scale()
        metrics["scaler/skipped_steps"] = float(tally.skipped_steps)
    return metrics


class MoeRouter:
    """Trials that differ in any scalar but the seed share data, batch order and initial weights."""

    Config = Config
    metrics = METRICS

    def run(self, config: Any, context: Context) -> Iterator[Report]:
        """Trains by a `Config`. Step numbers and metrics are described beside it."""
        return train(config, context)
