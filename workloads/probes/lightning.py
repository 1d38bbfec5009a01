"""Watches a Lightning `Trainer` as `watch` does any loop: `Trainer(callbacks=[HealthCallback()])`. Trains nothing.

Works with `lightning` and with `pytorch_lightning`, whichever the program has imported. What was measured last is
logged whenever the trainer logs.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any

from torch import Tensor

from workloads.probes.watch import WatchingCallback

LOSSES = ("train/loss", "val/loss")
HELD_OUT = ("val_loss", "val/loss")  # what modules usually log it as
PACKAGES = ("lightning.pytorch", "pytorch_lightning")  # two copies of everything: a program uses one


def _lightning() -> Any:
    for name in sorted(PACKAGES, key=lambda name: name not in sys.modules):  # what is imported already comes first
        try:
            return importlib.import_module(name)
        except ImportError as error:
            missing = error
    raise ImportError("HealthCallback needs Lightning: pip install lightning, or pytorch-lightning") from missing


pl = _lightning()


class HealthCallback(WatchingCallback, pl.Callback):  # type: ignore[misc,name-defined]  # untyped here
    """Takes what `watch` takes beside model, optimiser, scaler and clip norm, which are the trainer's."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if len(trainer.optimizers) != 1:
            text = "no health: %s optimisers; watch(model, optimizer, blocks=...) in on_train_start takes one each"
            logging.getLogger(__name__).warning(text, len(trainer.optimizers))
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        found = {"scaler": scaler, "clip_norm": clip_norm_of(trainer, pl_module)}
        self.begin(pl_module, trainer.optimizers[0], trainer.global_step, **found)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.health:
            if isinstance(outputs, dict) and isinstance(loss := outputs.get("loss"), Tensor):
                self.health.loss(loss.detach() * trainer.accumulate_grad_batches)  # it has been divided by that
            if trainer.log_every_n_steps and trainer.global_step % trainer.log_every_n_steps == 0:
                # The module logs its own losses, and perhaps by these names.
                measured = {name: value for name, value in self.health.metrics().items() if name not in LOSSES}
                pl_module.log_dict(measured)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        name = next((name for name in HELD_OUT if name in trainer.callback_metrics), None)
        if self.health and name and not trainer.sanity_checking:
            self.health.held_out(trainer.callback_metrics[name])

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.end()


def clip_norm_of(trainer: Any, pl_module: Any) -> float | None:
    """What the trainer clips to, infinity for no clip; None where the module clips by its own rules, or by value."""
    own = type(pl_module).configure_gradient_clipping is not pl.LightningModule.configure_gradient_clipping
    if own or not pl_module.automatic_optimization or trainer.gradient_clip_algorithm == "value":
        return None
    return float(trainer.gradient_clip_val or "inf")
