"""Builds the GPT of a config from tensors without values and reports what it would hold. Allocates none of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from orchestrator.trial import Report
from orchestrator.workload import Context
from workloads.engine.precision import POLICIES
from workloads.layers.transformer import GPT, GPTShape
from workloads.memory.config import METRICS, Config
from workloads.memory.saved import Kept, watch_forward

MEGABYTE = 1e6  # decimal, as memory is sold


def measure(config: Config) -> dict[str, float]:
    """The metrics of a config. Fake tensors take the CPU's kernels; meta tensors would write the attention out."""
    with FakeTensorMode(), attention_kernel(config.attention):
        return metrics_of(*run_forward(config))


def run_forward(config: Config) -> tuple[GPT, Kept]:
    """The model, and what it keeps of a micro-batch. Needs the memory unless called under a FakeTensorMode."""
    model = GPT(shape_of(config), POLICIES[config.precision], torch.Generator().manual_seed(0))
    tokens_BT = torch.zeros((config.batch_size, config.context), dtype=torch.int64)
    return model, watch_forward(model, tokens_BT, torch.zeros_like(tokens_BT))


def shape_of(config: Config) -> GPTShape:
    """The config's fields that a shape has under the same name."""
    return GPTShape(**config.model_dump(include={field.name for field in fields(GPTShape)}))


def attention_kernel(attention: str) -> AbstractContextManager[Any]:
    return sdpa_kernel(SDPBackend.MATH) if attention == "math" else nullcontext()


def metrics_of(model: GPT, kept: Kept) -> dict[str, float]:
    weights = {name: sum(weight.nbytes for weight in block) for name, block in model.blocks().items()}
    saved = kept.num_bytes()
    weight_bytes, saved_bytes = sum(weights.values()), sum(saved.values())
    return {
        "memory/num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "memory/weight_bytes": weight_bytes,
        "memory/weight_megabytes": weight_bytes / MEGABYTE,
        "memory/saved_bytes": saved_bytes,
        "memory/saved_megabytes": saved_bytes / MEGABYTE,
        "memory/log_probabilities_share": kept.largest("loss") / saved_bytes,
        **{f"memory/weight_bytes/{name}": count for name, count in weights.items()},
        **{f"memory/saved_bytes/{name}": count for name, count in saved.items()},
    }


class Memory:
    """One report, at step 1."""

    Config = Config
    metrics = METRICS

    def run(self, config: Any, context: Context) -> Iterator[Report]:
        """Measures a `Config`."""
        yield Report(1, measure(config))
