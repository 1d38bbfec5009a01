"""Which values of a real model's gradient a number format loses. Changes no gradient."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from orchestrator.workload import Context
from workloads.char_gpt.config import Config as CharConfig
from workloads.char_gpt.train import CharGpt
from workloads.engine.training import Training
from workloads.rounding.config import Config

QKV_BIAS = "attention.qkv.bias"  # of queries, keys and values, one behind the other


def measure_gradients(config: Config, context: Context, dtype: torch.dtype) -> dict[str, float]:
    """The loss of the next batch of a character GPT, and what rounding its gradient loses."""
    loss, gradients = char_gpt_gradients(config, context)
    return {"train/loss": loss, **count_losses(gradients, dtype, config.loss_scale)}


def char_gpt_gradients(config: Config, context: Context) -> tuple[float, dict[str, Tensor]]:
    """A batch's loss and its float32 gradients after `train_steps` updates, by parameter; not scaled, not clipped."""
    model = CharConfig(
        steps=max(1, config.train_steps),
        batch_size=config.batch_size,
        depth=config.depth,
        width=config.width,
        context=config.context,
    )
    training = Training.begin(CharGpt(), model, context)
    for _ in range(config.train_steps):
        if context.stopping:
            break  # what is measured then is not reported
        training.advance()
    training.trainer.clear_gradients()
    loss, _ = training.trainer.accumulate(training.draw_window(), {})
    named = training.model.named_parameters()
    return loss.item(), {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def count_losses(gradients: Mapping[str, Tensor], dtype: torch.dtype, loss_scale: float) -> dict[str, float]:
    """Values that round to 0 or to infinity once they are multiplied by the loss scale."""
    values = torch.cat([gradient.flatten() for gradient in gradients.values()])
    biases = [gradient.chunk(3) for name, gradient in gradients.items() if name.endswith(QKV_BIAS)]
    rounded = (values * loss_scale).to(dtype)
    num_underflow = count_underflow(values, dtype, loss_scale)
    return {
        "grad/underflow_share": num_underflow / len(values),
        "grad/num_underflow": num_underflow,
        "grad/num_underflow_key_bias": sum(count_underflow(keys, dtype, loss_scale) for _, keys, _ in biases),
        "grad/num_overflow": (rounded.isinf() & values.isfinite()).sum().item(),
        "grad/num_zero": (values == 0).sum().item(),
        "grad/num_values": len(values),
        "grad/abs_max": values.abs().max().item(),
    }


def count_underflow(values: Tensor, dtype: torch.dtype, loss_scale: float) -> int:
    """How many values that are not 0 become 0."""
    return int((((values * loss_scale).to(dtype) == 0) & (values != 0)).sum())
