"""Optimisers and learning-rate schedules, all of them torch's own. Steps nothing.

A schedule is a function of the number of applied updates; whether an update was applied is the trainer's to know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch._dynamo  # the first optimiser imports it, for a second and more: here that is not the first trial's cost
from torch import nn

from workloads.engine.training_config import TrainingConfig

Groups = list[dict[str, Any]]


def decay_groups(parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> Groups:
    """Matrices decay; biases, norms and scalars do not, as in GPT-2's training (Radford et al., 2019)."""
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in parameters:
        (decayed if parameter.dim() >= 2 and "bias" not in name else kept).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(config: TrainingConfig, groups: Groups) -> torch.optim.Optimizer:
    """The optimiser of `config.optimizer`, in its fused form: one kernel an update, the same arithmetic.

    Complex parameters have no fused form.
    """
    fused = all(parameter.is_floating_point() for group in groups for parameter in group["params"])
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=fused)
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=fused)


def build_schedules(
    config: TrainingConfig, optimizer: torch.optim.Optimizer
) -> list[torch.optim.lr_scheduler.LRScheduler]:
    """The schedule as torch's LambdaLR; none for a constant rate without warm-up."""
    if config.schedule == "constant" and config.warmup_steps == 0:
        return []
    course = COURSES[config.schedule]
    factor = partial(lr_share, warmup_steps=config.warmup_steps, steps=config.steps, floor=config.min_lr_share)
    return [torch.optim.lr_scheduler.LambdaLR(optimizer, partial(factor, course=course))]


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    schedules: Sequence[torch.optim.lr_scheduler.LRScheduler],
    state: dict[str, Any],
    courses: Sequence[dict[str, Any]],
) -> None:
    """Moments and the schedule's place come from the state, settings (lr, weight decay, ...) from the optimiser's own.

    They are equal but for a state that was copied from a trial with other settings.
    """
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    rates = [own.get("initial_lr", own["lr"]) for own in settings]
    optimizer.load_state_dict(state)
    for schedule, course in zip(schedules, courses, strict=True):
        schedule.load_state_dict({**course, "base_lrs": rates})
    for group, own, rate in zip(optimizer.param_groups, settings, rates, strict=True):
        saved_lr, saved_rate = group["lr"], group.get("initial_lr", group["lr"])
        group.update(own)
        group["lr"] = saved_lr if saved_rate == rate else saved_lr / saved_rate * rate  # bit for bit where equal


def lr_share(
    num_applied: int, *, warmup_steps: int, steps: int, floor: float, course: Callable[[float], float]
) -> float:
    """What the learning rate is multiplied by after `num_applied` updates: 1/w, 2/w .. 1, then from 1 to `floor`."""
    if num_applied < warmup_steps:
        return (num_applied + 1) / warmup_steps
    progress = (num_applied - warmup_steps) / max(1, steps - warmup_steps)
    return floor + (1 - floor) * course(min(1.0, progress))


COURSES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),  # SGDR (Loshchilov & Hutter, 2017)
}
