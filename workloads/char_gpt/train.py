"""What the training loop needs of `char_gpt`: its text, its model, its loss and what is seen of them.

Axes: B rows, T time, V symbols.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.workload import Context
from workloads.char_gpt.bugs import plant
from workloads.char_gpt.config import METRICS
from workloads.char_gpt.config import Config as CharConfig
from workloads.char_gpt.text import Text, load_text
from workloads.data.tokens import TokenBatch, describe_surprise, token_surprise
from workloads.engine.precision import POLICIES
from workloads.engine.training import TrainingWorkload
from workloads.engine.update import Blocks, Call, Hyper, Trainer, Update
from workloads.layers.router import Routing
from workloads.layers.transformer import GPT, GPTShape, PositionEmbedding
from workloads.memory.formula import predict_saved_bytes
from workloads.memory.saved import sections_of
from workloads.probes.catalogue import Thresholds
from workloads.probes.memory import memory_probes
from workloads.probes.probe import Probe
from workloads.probes.targets import TargetsProbe


class Seen(NamedTuple):
    """What a micro-batch showed beside its loss."""

    cross_entropy: Tensor
    routings: list[Routing]


class CharGpt(TrainingWorkload):
    """Trials that differ in any scalar but the seed share batches and initial weights."""

    Config = CharConfig
    metrics: ClassVar[tuple[str, ...]] = METRICS

    def data(self, config: CharConfig, context: Context) -> Text:
        return plant(config.bug, Text)(**vars(load_text(config, context)))

    def build(self, config: CharConfig, data: Text, source: torch.Generator) -> GPT:
        positions = plant(config.bug, PositionEmbedding)
        return GPT(shape_of(config, data), POLICIES[config.precision], source, positions=positions)

    def trainer(self, config: CharConfig, **parts: Any) -> Trainer:
        return plant(config.bug, Trainer)(**parts)

    def loss(self, call: Call, batch: TokenBatch, hyper: Hyper) -> tuple[Tensor, Seen]:
        logits_BTV, routings = call(batch.tokens_BT, batch.valid_BT, batch.noise)
        loss = mean_cross_entropy(logits_BTV, batch.targets_BT, batch.valid_BT)
        return loss, Seen(loss.detach(), routings)

    def blocks(self, model: nn.Module) -> Blocks:
        assert isinstance(model, GPT)
        return model.blocks()

    def probes(self, config: CharConfig, model: nn.Module, thresholds: Thresholds) -> list[Probe]:
        assert isinstance(model, GPT)
        predicted = self.predicted_bytes(config, model)
        memory = memory_probes(config, thresholds, model, sections_of(model), predicted)
        targets = [TargetsProbe(thresholds)] if self.causal else []
        return [*super().probes(config, model, thresholds), *targets, *memory]

    def predicted_bytes(self, config: CharConfig, model: GPT) -> Mapping[str, int] | None:
        """What a micro-batch keeps by section, where a closed form is known."""
        return predict_saved_bytes(model.shape, model.precision, config.batch_size, config.context, config.padding > 0)

    def observe(self, config: CharConfig, update: Update) -> dict[str, float]:
        return {"train/cross_entropy": float(sum(share * seen.cross_entropy for share, seen in update.seen))}

    def evaluate(self, config: CharConfig, model: nn.Module, data: Text, hyper: Hyper) -> dict[str, float]:
        surprise = describe_surprise(token_surprise(model, data.held_out_NT))
        return {**{f"val/{name}": value for name, value in surprise.items()}, **data.sizes()}


def shape_of(config: CharConfig, data: Text) -> GPTShape:
    return GPTShape(
        vocabulary=data.corpus.num_symbols,
        context=config.context,
        depth=config.depth,
        heads=config.heads,
        width=config.width,
        tied=config.tied,
        residual=config.residual,
        dropout=config.dropout,
        checkpointing=config.checkpointing,
    )


def mean_cross_entropy(logits_BTV: Tensor, targets_BT: Tensor, valid_BT: Tensor | None) -> Tensor:
    """Mean over valid targets, a scalar; 0 where none is valid: such a micro-batch adds nothing to its window."""
    if valid_BT is None:
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
    nats_N = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none")
    return nats_N.where(valid_BT.flatten(), 0.0).sum() / valid_BT.sum().clamp(min=1)
