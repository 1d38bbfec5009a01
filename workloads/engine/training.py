"""The one training loop. A workload brings data, model and loss; the loop accumulates, steps, measures and reports.

Step s is the state after s updates (an update that was skipped because its gradient was not finite counts as one).
Nothing is reported before the first update.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from orchestrator.trial import Finding, Report, Severity
from orchestrator.workload import Context
from workloads.engine import checkpoint
from workloads.engine.devices import choose_device
from workloads.engine.optimizers import Groups, build_optimizer, build_schedules, decay_groups, restore_optimizer
from workloads.engine.precision import POLICIES, loss_scaler
from workloads.engine.random import generator, noise_seed, with_own_globals
from workloads.engine.tally import Tally
from workloads.engine.training_config import TrainingConfig
from workloads.engine.update import Batch, Blocks, Call, Hyper, Trainer, Update
from workloads.engine.windows import Windows
from workloads.probes.blocks import named_blocks
from workloads.probes.catalogue import CHECKS, EARLY_CHECKS, THRESHOLDS, Thresholds
from workloads.probes.health import Health
from workloads.probes.probe import Look, Probe
from workloads.probes.standard import standard_probes

SMALLEST_LOSS_SCALE = (
    1.0  # below it the scale makes gradients smaller than they are: what overflows then does so itself
)


class Data(Protocol):
    """Training rows and, apart from them, whatever evaluation needs."""

    @property
    def num_rows(self) -> int:
        """How many rows a window may draw from."""

    def batch(self, indices_B: Tensor, noise: int) -> Batch:
        """The rows of those indices. `noise` seeds what is random in this micro-batch alone, such as dropout masks."""

    def to(self, device: str) -> Self: ...


class TrainingWorkload(ABC):
    """A workload that is trained by the loop. `data`, `build` and `loss` are needed; the rest has defaults."""

    Config: ClassVar[type[TrainingConfig]]
    metrics: ClassVar[tuple[str, ...]]
    checks: ClassVar[tuple[str, ...]] = tuple(CHECKS)
    early_checks: ClassVar[tuple[str, ...]] = EARLY_CHECKS
    causal: ClassVar[bool] = True  # False: a model of tokens that may see all of them and be asked for any
    thresholds: ClassVar[Mapping[str, float]] = THRESHOLDS

    @abstractmethod
    def data(self, config: Any, context: Context) -> Data:
        """What is trained on, on the CPU; random parts come from `generator(context, stream)`."""

    @abstractmethod
    def build(self, config: Any, data: Any, source: torch.Generator) -> nn.Module:
        """The model, initialised from `source`."""

    @abstractmethod
    def loss(self, call: Call, batch: Any, hyper: Hyper) -> tuple[Tensor, Any]:
        """The mean loss over the batch's valid targets, a scalar, and whatever `observe` wants to see of it."""

    def blocks(self, model: nn.Module) -> Blocks:
        """Every trained parameter once, by the name its gradient norm is reported under: its part of the model.

        A parameter that several parts share belongs to the first of them.
        """
        return named_blocks(model)

    def parameter_groups(self, config: Any, model: nn.Module) -> Groups:
        """Parameters by what their optimiser does differently."""
        return decay_groups(model.named_parameters(), config.weight_decay)

    def hyper(self, config: Any, step: int) -> Hyper:
        """The scalars of the loss at a step."""
        return {}

    def prepare(self, call: Call, window: Sequence[Any], hyper: Hyper) -> Hyper:
        """What the loss of a micro-batch must know of the whole window, added to `hyper`."""
        return hyper

    def trainer(self, config: Any, **parts: Any) -> Trainer:
        return Trainer(**parts)

    def observe(self, config: Any, update: Update) -> Mapping[str, float]:
        """Metrics of the training batch, at a report."""
        return {}

    def evaluate(self, config: Any, model: nn.Module, data: Any, hyper: Hyper) -> Mapping[str, float]:
        """Metrics on held-out data, at a report; called in eval mode and without gradients."""
        return {}

    def limits(self, context: Context) -> Thresholds:
        """The workload's thresholds with the sweep's changes."""
        return Thresholds.of({**self.thresholds, **context.thresholds})

    def probes(self, config: Any, model: nn.Module, thresholds: Thresholds) -> list[Probe]:
        """What watches the training; a workload may add its own, whose limits are in `thresholds.own`."""
        return standard_probes(thresholds, model, self.blocks(model))

    def run(self, config: Any, context: Context) -> Iterator[Report]:
        """Trains to `config.steps`, from the last checkpoint if there is one."""
        yield from with_own_globals(train(self, config, context), context.seed("globals"))

    def check(self, config: Any, context: Context) -> Iterator[Finding]:
        """Small experiments before anything trains: the standard ones (see `workloads.checks`), then its own."""
        from workloads.checks.training import check_training  # it imports the engine

        yield from check_training(self, config, context)

    def own_checks(self, config: Any, context: Context) -> Iterable[Finding]:
        """What a workload tries besides; draws from the global generators as it likes."""
        return ()


def train(workload: TrainingWorkload, config: TrainingConfig, context: Context) -> Generator[Report]:
    """Reports at the asked steps, at the last one, and at the first step that could not be used."""
    training = Training.begin(workload, config, context)
    while training.step < config.steps:
        if context.stopping:
            training.save()
            return
        update, hyper = training.advance()
        if training.is_reported() or training.health.news:
            yield training.report(update, hyper)
        if training.is_saved():
            training.save()


@dataclass
class Training:
    """A model in training, and where it is."""

    workload: TrainingWorkload
    config: TrainingConfig
    context: Context
    data: Any
    model: nn.Module
    trainer: Trainer
    windows: Windows
    step: int = 0
    evaluated_at: int = 0
    healthy: bool = True
    tally: Tally = field(default_factory=Tally)
    health: Health = field(init=False)

    def __post_init__(self) -> None:
        limits = self.workload.limits(self.context)
        self.health = Health((), self.context.finding)
        own, standard = self.workload.probes, partial(TrainingWorkload.probes, self.workload)
        self.health.build(*(partial(probes, self.config, self.model, limits) for probes in (own, standard)))

    @classmethod
    def begin(cls, workload: TrainingWorkload, config: TrainingConfig, context: Context) -> Training:
        """Before the first update, or where the last checkpoint was written."""
        device = choose_device(config.device, context)
        data = workload.data(config, context)
        model = workload.build(config, data, generator(context, "init")).to(device)
        trainer = build_trainer(workload, config, model, device)
        order = generator(context, "order")
        windows = Windows(data.num_rows, config.batch_size, config.accumulation_steps, config.order, order)
        training = cls(workload, config, context, data.to(device), model, trainer, windows)
        if (saved := context.checkpoint.load()) is not None:
            training.restore(saved)
        return training

    def advance(self) -> tuple[Update, Hyper]:
        """One update, and its hyperparameters."""
        self.step += 1
        thorough = self.is_reported() or self.step <= 2  # what is wrong from the start is said at once
        with self.tally.timed():
            hyper = {"lr": self.trainer.optimizer.param_groups[0]["lr"], **self.workload.hyper(self.config, self.step)}
            window, self.trainer.is_watched = self.draw_window(), thorough and bool(self.health.probes)
            with self.health.around(self.step) if thorough else nullcontext():
                update = self.trainer.update(window, hyper)
            self.health.updated(Look(self.step, update, window, hyper, self.trainer, thorough))
        self.tally.add(update, window)
        if self.healthy and not usable(update, self.trainer):
            self.healthy = False
            self.health.found(describe_trouble(update, self.step))
        return update, hyper

    def is_reported(self) -> bool:
        return self.context.should_report(self.step) or self.step == self.config.steps

    def is_saved(self) -> bool:
        """The last step's result is said; its state is of use to a person only."""
        checkpoint = self.context.checkpoint
        return checkpoint.is_kept if self.step == self.config.steps else checkpoint.due(self.step)

    def draw_window(self) -> list[Batch]:
        stream = self.context.seed("noise")
        drawn = enumerate(self.windows.draw())
        return [self.data.batch(indices, noise_seed(stream, self.step, micro)) for micro, indices in drawn]

    def report(self, update: Update, hyper: Hyper) -> Report:
        metrics = {**update_metrics(update, self.trainer, self.tally), "train/lr": float(hyper["lr"])}
        metrics |= {**self.workload.observe(self.config, update), **self.evaluate(hyper)}
        metrics = {**self.health.measured(self.step), **metrics}  # a probe replaces nothing that was trained on
        self.health.reported(self.step, metrics)
        self.health.news = False
        return Report(self.step, metrics)

    def evaluate(self, hyper: Hyper) -> Mapping[str, float]:
        """At the first report at or after each due step, and at the last step."""
        every = self.config.eval_every or 1
        if self.step // every == self.evaluated_at // every and self.step != self.config.steps:
            return {}
        self.evaluated_at = self.step
        self.model.eval()
        with torch.no_grad():
            metrics = self.workload.evaluate(self.config, self.model, self.data, hyper)
        self.model.train()
        return metrics

    def save(self) -> None:
        self.context.checkpoint.save(self.step, checkpoint.to_bytes(self.state_dict()))

    def restore(self, saved: bytes) -> None:
        """Raises ValueError for a state of another model."""
        try:
            self.load_state_dict(checkpoint.from_bytes(saved))
        except RuntimeError as error:
            raise ValueError(
                f"the trial's checkpoint does not fit this model; was its code changed? {error}"
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """Everything the updates after this step depend on, but the global generators."""
        return {
            "step": self.step,
            "evaluated_at": self.evaluated_at,
            "healthy": self.healthy,
            "tally": asdict(self.tally),
            "health": self.health.state_dict(self.step),
            "model": self.model.state_dict(),
            "optimizer": self.trainer.optimizer.state_dict(),
            "schedules": [schedule.state_dict() for schedule in self.trainer.schedules],
            "scaler": self.trainer.scaler.state_dict(),
            "windows": self.windows.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Strictly. Raises RuntimeError for weights that do not fit the model."""
        self.step, self.evaluated_at, self.healthy = state["step"], state["evaluated_at"], state["healthy"]
        self.tally = Tally(**state["tally"])
        self.health.load_state_dict(state["health"], self.step)
        self.model.load_state_dict(state["model"], strict=True)
        restore_optimizer(self.trainer.optimizer, self.trainer.schedules, state["optimizer"], state["schedules"])
        self.trainer.scaler.load_state_dict(state["scaler"])
        self.windows.load_state_dict(state["windows"])


def build_trainer(workload: TrainingWorkload, config: TrainingConfig, model: nn.Module, device: str) -> Trainer:
    optimizer = build_optimizer(config, workload.parameter_groups(config, model))
    return workload.trainer(
        config,
        call=torch.compile(model) if config.compile else model,
        loss=workload.loss,
        blocks=workload.blocks(model),
        optimizer=optimizer,
        scaler=loss_scaler(POLICIES[config.precision], device),
        clip_norm=config.clip_norm,
        schedules=build_schedules(config, optimizer),
        prepare=workload.prepare,
    )


def usable(update: Update, trainer: Trainer) -> bool:
    """False when training cannot be trusted from here on.

    A step skipped by the loss scaler is business as usual as long as a smaller scale can help: the loss itself does not
    depend on it.
    """
    if update.num_nonfinite_parameters or update.applied:
        return update.num_nonfinite_parameters == 0
    can_help = trainer.scaler.is_enabled() and trainer.scaler.get_scale() >= SMALLEST_LOSS_SCALE
    return can_help and math.isfinite(update.loss)


def describe_trouble(update: Update, step: int) -> Finding:
    if update.num_nonfinite_parameters:
        message = f"{update.num_nonfinite_parameters} parameter values are not finite after this update"
    else:
        loss, norm = float(update.loss), update.norms["total"]
        message = f"the loss is {loss:.4g} and the gradient's norm {norm:.4g}; the update was not applied"
    return Finding("nonfinite_update", Severity.ERROR, message, "lower lr, set clip_norm, or raise c_z", step)


def update_metrics(update: Update, trainer: Trainer, tally: Tally) -> dict[str, float]:
    """Loss, norms and counts. An unusable update has no loss: NaN, which the orchestrator calls diverged."""
    metrics = {
        "train/loss": float(update.loss) if usable(update, trainer) else math.nan,
        "params/nonfinite": float(update.num_nonfinite_parameters),
        **{f"grad/preclip/{name}": norm for name, norm in update.norms.items()},
        **tally.take(),
    }
    if trainer.scaler.is_enabled():
        metrics["scaler/scale"] = trainer.scaler.get_scale()
        metrics["scaler/skipped_steps"] = float(tally.skipped_steps)
    return metrics
