"""Watches a Hugging Face `Trainer` as `watch` does any loop: `Trainer(callbacks=[HealthCallback()])`. Trains nothing.

What was measured last joins the trainer's own log history wherever that logs a loss. The trainer's default
`logging_nan_inf_filter` hides a loss that is not finite; this callback sees it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from workloads.probes.watch import WatchingCallback, watch

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError("HealthCallback needs Hugging Face's library: pip install 'transformers[torch]'") from error


OWN = ("train/loss", "val/loss")  # the trainer logs them, by other names


class HealthCallback(WatchingCallback, TrainerCallback):  # type: ignore[misc]  # untyped here
    """Takes what `watch` takes beside model, optimiser, scaler and clip norm, which are the trainer's."""

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, **others: Any
    ) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps the one that steps
        if not isinstance(inner, Optimizer):
            logging.getLogger(__name__).warning("no health: a %s has no hooks to watch it by", type(inner).__name__)
            return
        scaler = getattr(optimizer, "scaler", None)
        clip_norm = args.max_grad_norm or float("inf")  # 0 is no clip
        self.health = watch(model, inner, **{"scaler": scaler, "clip_norm": clip_norm, **self.watching})
        self.health.step = state.global_step  # a resumed training goes on counting
        self.handle = None if args.torch_compile else model.register_forward_hook(self._hear, with_kwargs=True)

    def _hear(self, model: nn.Module, inputs: Any, named: Mapping[str, Any], output: Any) -> None:
        if self.health and model.training and isinstance(output, Mapping) and (loss := output.get("loss")) is not None:
            tokens = named["input_ids"].numel() if named.get("input_ids") is not None else 0  # padding included
            # One loss a device, under DataParallel; detached, since what the trainer makes of it is its own matter.
            self.health.loss(loss.detach().mean(), tokens)

    def on_evaluate(self, args: Any, state: Any, control: Any, *, metrics: Mapping[str, float], **others: Any) -> None:
        if self.health and "eval_loss" in metrics:
            self.health.held_out(metrics["eval_loss"])

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Mapping[str, float], **others: Any) -> None:
        if self.health and "loss" in logs:
            # Its own loss is there; what a model returns is a part of it where several micro-batches make an update.
            measured = {name: value for name, value in self.health.metrics().items() if name not in OWN}
            state.log_history[-1] |= measured

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.health:
            self.health.close()
            if self.handle:
                self.handle.remove()
