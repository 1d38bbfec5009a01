"""What the training loop needs of a GPT with mixtures of experts, beyond what `char_gpt` gives it.

Axes: L layers with a router, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from workloads.char_gpt.bugs import DetachedPositions
from workloads.char_gpt.text import Text
from workloads.char_gpt.train import CharGpt, Seen, mean_cross_entropy, shape_of
from workloads.data.tokens import TokenBatch
from workloads.engine.precision import POLICIES, Precision
from workloads.engine.update import Call, Hyper, Update
from workloads.layers.router import Routing, expert_load, load_balance_loss, router_z_loss
from workloads.layers.router_metrics import joined, logit_metrics, router_metrics, to_floats
from workloads.layers.transformer import GPT, PositionEmbedding
from workloads.moe_gpt.config import METRICS, Config
from workloads.moe_gpt.experts import MoeFeedForward


class MoeLanguageModel(CharGpt):
    """The small methods are there for planted bugs to replace."""

    metrics = METRICS

    def build(self, config: Config, data: Text, source: torch.Generator) -> GPT:  # type: ignore[override]
        shape, precision = shape_of(config, data), self.precision(config)
        renormalize = self.renormalize(config)
        positions = DetachedPositions if config.bug == "detached_positions" else PositionEmbedding

        def feed_forward(layer: int) -> nn.Module:
            return MoeFeedForward(config, shape, precision, renormalize, source)

        return GPT(shape, precision, source, feed_forward, positions)

    def precision(self, config: Config) -> Precision:
        return POLICIES[config.precision]

    def renormalize(self, config: Config) -> bool:
        return config.renormalize is True

    def hyper(self, config: Config, step: int) -> Hyper:
        return {"alpha": config.alpha, "c_z": config.c_z}

    def prepare(self, call: Call, window: Sequence[TokenBatch], hyper: Hyper) -> Hyper:
        """The load of each layer over the whole window, which the balance loss of each micro-batch refers to."""
        if len(window) == 1 or hyper["alpha"] == 0:
            return hyper
        with torch.no_grad():
            routed = [self.routings(call(micro.tokens_BT, micro.valid_BT, micro.noise)[1]) for micro in window]
        return {**hyper, "load_LE": torch.stack([_loads(routings) for routings in routed]).sum(0)}

    def loss(self, call: Call, batch: TokenBatch, hyper: Hyper) -> tuple[Tensor, Seen]:
        logits_BTV, given = call(batch.tokens_BT, batch.valid_BT, batch.noise)
        routings = self.routings(given)
        cross_entropy = mean_cross_entropy(logits_BTV, batch.targets_BT, batch.valid_BT)
        loads_LE = cast(Tensor, hyper.get("load_LE", _loads(routings)))
        pairs = list(zip(routings, loads_LE, strict=True))
        balance = sum(load_balance_loss(r.probabilities_BE, r.experts_BK, r.valid_B, load_E) for r, load_E in pairs)
        z = sum(self.z_loss(routing) for routing in routings)
        loss = cross_entropy + hyper["alpha"] * balance + hyper["c_z"] * z
        return loss, Seen(cross_entropy.detach(), routings)

    def routings(self, given: list[Routing]) -> list[Routing]:
        """What the layers did, once each."""
        return given

    def z_loss(self, routing: Routing) -> Tensor:
        return router_z_loss(routing.logits_BE, routing.valid_B)

    def observe(self, config: Config, update: Update) -> dict[str, float]:  # type: ignore[override]
        """The routers' state, over all layers and layer by layer."""
        seen = [observed.routings for _, observed in update.seen]
        layers = [list(routings) for routings in zip(*seen, strict=True)]  # per layer, its micro-batches
        metrics = router_metrics([routing for routings in layers for routing in routings], config.k)
        by_layer = [_layer_metrics(routings, config.k) for routings in layers]
        metrics["router/load_max_over_mean"] = torch.stack([one["router/load_max_over_mean"] for one in by_layer]).max()
        named = {f"{name}/layer{layer}": value for layer, one in enumerate(by_layer) for name, value in one.items()}
        return {**super().observe(config, update), **to_floats({**metrics, **named})}

    def evaluate(  # type: ignore[override]
        self, config: Config, model: nn.Module, data: Text, hyper: Hyper
    ) -> dict[str, float]:
        """Held-out surprise, and the routers' logits on the first 64 held-out windows."""
        _, routings = model(data.held_out_NT[:64, :-1])
        logits = {f"val/{name}": value for name, value in logit_metrics(joined(routings)).items()}
        return {**super().evaluate(config, model, data, hyper), **to_floats(logits)}


def _loads(routings: Sequence[Routing]) -> Tensor:
    """Assignments asked for, [L, E]."""
    return torch.stack([expert_load(r.experts_BK, r.logits_BE.shape[-1], r.valid_B) for r in routings])


def _layer_metrics(routings: Sequence[Routing], k: int) -> Mapping[str, Tensor]:
    metrics = router_metrics(routings, k)
    return {name: value for name, value in metrics.items() if not name.startswith(("router/load/", "router/assign"))}
