"""What the checks experiment on: a workload's data, models and trainers, made anew for each experiment. Judges nothing.

Everything is on the CPU and not compiled. Micro-batches hold a few rows and differ much in size. The trial's streams
are functions of their names, so that nothing is used up here.

Two methods that the workload's data may have are for the checks: `split_rows()` gives the training rows and the
held-out rows, two tensors [N, ...]; `shortened()` the same data with a few held-out rows, enough for an evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orchestrator.workload import Context
from workloads.engine.random import generator, noise_seed, seed_globals
from workloads.engine.update import Call, Hyper, Trainer, Update, dense_real
from workloads.probes.catalogue import Thresholds

if TYPE_CHECKING:  # the engine imports the checks
    from workloads.engine.training import TrainingWorkload

ROWS = (3, 1, 1)  # of the micro-batches, where a row holds many targets
ENOUGH_VALID = 64  # targets in the largest micro-batch: few rows of one target each would leave experts idle
SMALLEST_SCALE = 2.0**-20  # a loss scale that must go below it is not what makes the gradient overflow
EXACT = 1e-3  # relative; float32 gradients of equal sums agree to 1e-5
AMPLIFIED = 100.0  # coefficients of auxiliary losses, so that what they do is not hidden by the task
ROUNDINGS = 4  # how many times as far as one rounding of each weight the roundings of all products may lead

Gradient = list[Tensor]  # one tensor a parameter, dense and real; zeros where there is none


@dataclass(frozen=True)
class Subject:
    """A workload under one config. Its models start from the trial's own initial weights."""

    workload: TrainingWorkload
    config: Any
    context: Context

    @property
    def limits(self) -> Thresholds:
        return self.workload.limits(self.context)

    @cached_property
    def data(self) -> Any:
        return self.workload.data(self.config, self.context)

    @cached_property
    def indices(self) -> list[Tensor]:
        """The rows of three micro-batches, drawn from a stream of the checks' own."""
        source = generator(self.context, "checks")
        valid_a_row = max(self.data.batch(torch.zeros(1, dtype=torch.int64), 0).num_valid, 1)
        multiple = math.ceil(ENOUGH_VALID / (ROWS[0] * valid_a_row))
        return [torch.randint(self.data.num_rows, (multiple * rows,), generator=source) for rows in ROWS]

    @cached_property
    def window(self) -> list[Any]:
        """Three micro-batches of very unequal size."""
        return [self.batch_of(rows, micro) for micro, rows in enumerate(self.indices)]

    @cached_property
    def combined(self) -> Any:
        """The rows of the window as one batch."""
        return self.batch_of(torch.cat(self.indices), 0)

    @property
    def batch(self) -> Any:
        """The micro-batch that most experiments are made with."""
        return self.window[2]

    def batch_of(self, indices_B: Tensor, micro: int) -> Any:
        return self.data.batch(indices_B, noise_seed(self.context.seed("noise"), 0, micro))

    def model(self) -> nn.Module:
        """In training mode."""
        self.reseed()
        return self.workload.build(self.config, self.data, generator(self.context, "init"))

    def reseed(self) -> None:
        """What draws from the global generators draws the same again."""
        seed_globals(self.context.seed("checks"))

    def trainer(self, model: nn.Module, clip_norm: float | None = None) -> Trainer:
        """The workload's own, for `model`, with another clip; its loss scale is one that does not overflow."""
        trainer = self.first_trainer(model, clip_norm)
        if trainer.scaler.is_enabled():
            trainer.scaler.load_state_dict({**trainer.scaler.state_dict(), "scale": self.loss_scale})
        return trainer

    def first_trainer(self, model: nn.Module, clip_norm: float | None = None) -> Trainer:
        """As training begins with it."""
        from workloads.engine.training import build_trainer  # it imports the checks

        config = self.config.model_copy(update={"clip_norm": clip_norm, "compile": False})
        return build_trainer(self.workload, config, model, "cpu")

    @cached_property
    def loss_scale(self) -> float:
        """1 without a scaler; else the initial scale, halved until the window's gradient is finite, and twice more."""
        trainer = self.first_trainer(self.model())
        if not trainer.scaler.is_enabled():
            return 1.0
        while not self.update(trainer, self.window).applied and trainer.scaler.get_scale() > SMALLEST_SCALE:
            pass
        return trainer.scaler.get_scale() / 4

    @cached_property
    def hyper(self) -> Hyper:
        """The scalars of the first step's loss."""
        return {"lr": self.config.lr, **self.workload.hyper(self.config, 1)}

    def update(self, trainer: Trainer, window: Sequence[Any], **hyper: float) -> Update:
        self.reseed()
        return trainer.update(window, {**self.hyper, **hyper})

    def taken(self, trainer: Trainer, window: Sequence[Any], **hyper: float) -> Gradient:
        """The gradient that the optimiser takes in an update: seen as it steps, a trainer may clear it right after."""
        seen: list[Gradient] = []
        look = trainer.optimizer.register_step_pre_hook(lambda *_: seen.append(gradients_of(trainer.parameters)))
        self.update(trainer, window, **hyper)
        look.remove()
        return seen[-1] if seen else gradients_of(trainer.parameters)

    def applied(
        self, model: nn.Module, window: Sequence[Any], clip_norm: float | None = None, **hyper: float
    ) -> Gradient:
        """The gradient that the optimiser gets of one update, which moves the model."""
        return self.taken(self.trainer(model, clip_norm), window, **hyper)

    def loss(self, call: Call, batch: Any, **hyper: float) -> tuple[Tensor, Any]:
        """The workload's loss of one batch, a window by itself; `hyper` replaces scalars of the first step."""
        self.reseed()
        return self.workload.loss(call, batch, self.workload.prepare(call, [batch], {**self.hyper, **hyper}))

    def gradient(self, model: nn.Module, batch: Any, **hyper: float) -> Gradient:
        """In the order of `parameters(model)`."""
        loss, _ = self.loss(model, batch, **hyper)
        return self.gradient_of(loss, self.parameters(model))

    def gradient_of(self, loss: Tensor, parameters: Sequence[nn.Parameter]) -> Gradient:
        """In float16 under a loss scale, as training takes it. Other parameters of the model keep a gradient."""
        if not loss.requires_grad:
            return [torch.zeros_like(dense_real(one.detach())) for one in parameters]
        clear(parameters)
        (loss * self.loss_scale).backward()  # type: ignore[no-untyped-call]  # reentrant checkpoints allow no grad()
        found = times(1 / self.loss_scale, gradients_of(parameters))
        clear(parameters)
        return found

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """Those that are trained, in the order of their blocks."""
        return [parameter for block in self.workload.blocks(model).values() for parameter in block]

    @property
    def tolerance(self) -> float:
        """How far apart two gradients may be that would be equal without rounding, relative to their length."""
        return self._rounding[1]

    @property
    def epsilon(self) -> float:
        """Of the coarsest dtype that the model computes in, float32 or coarser."""
        return self._rounding[0]

    @property
    def is_exact(self) -> bool:
        """False for a model that computes in 16 bits, be it in part."""
        return self.epsilon <= torch.finfo(torch.float32).eps

    @cached_property
    def in_float32(self) -> Subject:
        """The same workload in float32, for what does not depend on rounding; itself where it is, or knows no other."""
        return self if self.is_exact else replace(self, config=self.config.model_copy(update={"precision": "fp32"}))

    @cached_property
    def _rounding(self) -> tuple[float, float]:
        """`epsilon` and `tolerance`.

        Rounding is amplified by depth and by choices such as top-k, so it is measured: each weight is moved by half a
        unit in the last place.
        """
        model = self.model().eval()
        with coarsest_dtype() as seen:
            exact = self.gradient(model, self.combined)
        source = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters(model):
                signs = torch.randint(0, 2, parameter.shape, generator=source) * 2 - 1
                parameter.mul_(1 + signs * max(seen) / 2)
        moved = distance(self.gradient(model, self.combined), exact)
        return max(seen), max(EXACT, max(seen), ROUNDINGS * moved)


@contextmanager
def coarsest_dtype() -> Iterator[list[float]]:
    """The machine epsilons of what is kept for the backward pass, the largest of which tells how coarse a model is."""
    seen = [torch.finfo(torch.float32).eps]

    def keep(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            seen.append(torch.finfo(tensor.dtype).eps)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield seen


@contextmanager
def called_modules(model: nn.Module, only_in_training: bool = False) -> Iterator[set[str]]:
    """Within it, the names of the modules that are called are collected."""
    seen: set[str] = set()

    def note(name: str, module: nn.Module, inputs: Any) -> None:
        if module.training or not only_in_training:
            seen.add(name)

    handles = [one.register_forward_pre_hook(partial(note, name)) for name, one in model.named_modules()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def dense(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    """A gradient as a dense real tensor; zeros for none."""
    if gradient is None:
        return torch.zeros_like(dense_real(parameter.detach()))
    gradient = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
    return dense_real(gradient).clone()


def clear(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def gradients_of(parameters: Sequence[nn.Parameter]) -> Gradient:
    return [dense(parameter.grad, parameter) for parameter in parameters]


def product(one: Gradient, other: Gradient) -> float:
    """The inner product, in float64."""
    return sum(float(torch.dot(a.double().flatten(), b.double().flatten())) for a, b in zip(one, other, strict=True))


def length(one: Gradient) -> float:
    return math.sqrt(product(one, one))


def difference(one: Gradient, other: Gradient) -> Gradient:
    return [a - b for a, b in zip(one, other, strict=True)]


def times(factor: float, one: Gradient) -> Gradient:
    return [factor * part for part in one]


def distance(one: Gradient, other: Gradient) -> float:
    """The length of the difference over that of `other`; 0 where both are nothing."""
    apart, whole = length(difference(one, other)), length(other)
    return apart / whole if whole else (math.inf if apart else 0.0)
