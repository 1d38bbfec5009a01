"""Watches a Hugging Face `Trainer` as `watch` does any loop: `Trainer(callbacks=[HealthCallback()])`. Trains nothing.

What was measured last joins the trainer's own log history wherever that logs a loss. The trainer's default
`logging_nan_inf_filter` hides a loss that is not finite; this callback sees it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from workloads.probes.hooks import Hook
from workloads.probes.watch import WatchingCallback

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError("HealthCallback needs Hugging Face's library: pip install 'transformers[torch]'") from error


OWN = ("train/loss", "val/loss")  # the trainer logs them, by other names


class HealthCallback(WatchingCallback, TrainerCallback):  # type: ignore[misc]  # untyped here
    """Takes what `watch` takes beside model, optimiser, scaler and clip norm, which are the trainer's."""

    def __init__(self, **watching: Any) -> None:
        super().__init__(**watching)
        self.handle: RemovableHandle | None = None
        self._clear()

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, **others: Any
    ) -> None:
        self.on_train_end(args, state, control)  # of a training that raised
        self.health = None
        inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps the one that steps
        if not isinstance(inner, Optimizer):
            logging.getLogger(__name__).warning("no health: a %s has no hooks to watch it by", type(inner).__name__)
            return
        scaler = getattr(optimizer, "scaler", None)
        clip_norm = args.max_grad_norm or float("inf")  # 0 is no clip
        self.begin(model, inner, state.global_step, scaler=scaler, clip_norm=clip_norm)
        if not args.torch_compile:
            self.handle = model.register_forward_hook(Hook(self._hear), with_kwargs=True)

    def _clear(self) -> None:
        self._losses: list[Tensor] = []  # of the micro-batches of one update
        self._num_tokens, self._is_share = 0, False

    def _hear(self, model: nn.Module, inputs: Any, named: Mapping[str, Any], output: Any) -> None:
        loss = output.get("loss") if isinstance(output, Mapping) else None
        if model.training and isinstance(loss, Tensor):
            self._losses.append(loss.detach().mean())
            self._num_tokens += named["input_ids"].numel() if named.get("input_ids") is not None else 0
            self._is_share = named.get("num_items_in_batch") is not None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Hands over the loss of the update, put together as the trainer does it; tokens with padding."""
        if self.health and self._losses:
            losses = torch.stack([loss.to(self._losses[0].device) for loss in self._losses])
            self.health.loss(losses.sum() * shares_of(args) if self._is_share else losses.mean(), self._num_tokens)
        self._clear()

    def on_evaluate(self, args: Any, state: Any, control: Any, *, metrics: Mapping[str, float], **others: Any) -> None:
        if self.health and "eval_loss" in metrics:
            self.health.held_out(metrics["eval_loss"])

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Mapping[str, float], **others: Any) -> None:
        if self.health and "loss" in logs:
            measured = {name: value for name, value in self.health.metrics().items() if name not in OWN}
            state.log_history[-1] |= measured

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.end()
        self._clear()
        if self.handle:
            self.handle.remove()


def shares_of(args: Any) -> float:
    """What the sum of the losses here counts where the model divides each by `num_items_in_batch`.

    Those are the items of the whole update: in all processes if it averages over them, else one device's.
    """
    return float(args.world_size if args.average_tokens_across_devices else 1 / max(args.n_gpu, 1))
