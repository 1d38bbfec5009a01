"""What the training loop needs of a GPT with mixtures of experts, beyond what `char_gpt` gives it.

Axes: L layers with a router, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from workloads.char_gpt.bugs import plant
from workloads.char_gpt.text import Text
from workloads.char_gpt.train import CharGpt, Seen, mean_cross_entropy, shape_of
from workloads.data.tokens import TokenBatch
from workloads.engine.precision import POLICIES, Precision
from workloads.engine.update import Call, Hyper, Update, weighted
from workloads.layers.router import Routing, balance, expert_load, router_z_loss
from workloads.layers.router_metrics import joined, logit_metrics, router_metrics, to_floats
from workloads.layers.transformer import GPT, PositionEmbedding
from workloads.moe_gpt.config import METRICS, Config
from workloads.moe_gpt.experts import MoeFeedForward
from workloads.probes.catalogue import Thresholds
from workloads.probes.probe import Probe
from workloads.probes.router import RouterProbe

WORST_LAYER = ("router/load_max_over_mean", "router/dead_experts")  # said of all layers by the worst of them
COUNTS = ("router/load/", "router/assignments")  # metrics that grow with the number of assignments counted


class MoeLanguageModel(CharGpt):
    """The small methods are there for planted bugs to replace."""

    metrics = METRICS

    def build(self, config: Config, data: Text, source: torch.Generator) -> GPT:  # type: ignore[override]
        shape, precision = shape_of(config, data), self.precision(config)
        renormalize = self.renormalize(config)

        def feed_forward(layer: int) -> nn.Module:
            return MoeFeedForward(config, shape, precision, renormalize, source)

        return GPT(shape, precision, source, feed_forward, plant(config.bug, PositionEmbedding))

    def precision(self, config: Config) -> Precision:
        return POLICIES[config.precision]

    def renormalize(self, config: Config) -> bool:
        return config.renormalize is True

    def hyper(self, config: Config, step: int) -> Hyper:
        return {"alpha": config.alpha, "c_z": config.c_z}

    def prepare(self, call: Call, window: Sequence[TokenBatch], hyper: Hyper) -> Hyper:
        """Each layer's load over the whole window, in shares: the balance loss of each micro-batch refers to it."""
        if len(window) == 1 or hyper["alpha"] == 0:
            return hyper
        with torch.no_grad():
            routed = [call(micro.tokens_BT, micro.valid_BT, micro.noise)[1] for micro in window]
        return {**hyper, "share_LE": self.shares(routed)}

    def loss(self, call: Call, batch: TokenBatch, hyper: Hyper) -> tuple[Tensor, Seen]:
        logits_BTV, routings = call(batch.tokens_BT, batch.valid_BT, batch.noise)
        cross_entropy = mean_cross_entropy(logits_BTV, batch.targets_BT, batch.valid_BT)
        evenness = weighted(hyper["alpha"], lambda: self.balance_loss(routings, hyper))
        z = weighted(hyper["c_z"], lambda: sum(self.z_loss(routing) for routing in routings))
        return cross_entropy + evenness + z, Seen(cross_entropy.detach(), routings)

    def balance_loss(self, routings: Sequence[Routing], hyper: Hyper) -> Tensor:
        """E * sum_i f_i P_i, summed over the layers: f_i of the whole window, P_i the mean over these valid tokens."""
        share_LE = cast(Tensor, hyper["share_LE"]) if "share_LE" in hyper else self.shares([routings])
        pairs = zip(routings, share_LE, strict=True)
        return torch.stack([balance(r.probabilities_BE, share_E, r.valid_B) for r, share_E in pairs]).sum()

    def shares(self, routed: Sequence[Sequence[Routing]]) -> Tensor:
        """f_i, each expert's share of the k * num_valid assignments of some micro-batches; float64 [L, E]."""
        load_LE = torch.stack([_loads(routings) for routings in routed]).sum(0)
        num_valid = torch.stack([routings[0].valid_B.sum() for routings in routed]).sum()
        return self.counted(load_LE).double() / (num_valid * routed[0][0].experts_BK.shape[-1]).clamp(min=1)

    def counted(self, num_assignments: Tensor) -> Tensor:
        """Each assignment counts once, also where the backward pass recomputes it."""
        return num_assignments

    def z_loss(self, routing: Routing) -> Tensor:
        return router_z_loss(routing.logits_BE, routing.valid_B)

    def probes(self, config: Config, model: nn.Module, thresholds: Thresholds) -> list[Probe]:  # type: ignore[override]
        promise = POLICIES[config.precision]  # not self.precision: that is what the probe is to doubt
        router = RouterProbe(thresholds, promise, config.k, config.num_experts, parts_of)
        return [*super().probes(config, model, thresholds), router]

    def predicted_bytes(self, config: Config, model: GPT) -> None:  # type: ignore[override]
        """What experts keep depends on who is sent to them."""
        return None

    def observe(self, config: Config, update: Update) -> dict[str, float]:  # type: ignore[override]
        """The routers' state, over all layers and layer by layer."""
        seen = [observed.routings for _, observed in update.seen]
        layers = [list(routings) for routings in zip(*seen, strict=True)]  # per layer, its micro-batches
        metrics = router_metrics([routing for routings in layers for routing in routings])
        by_layer = [_layer_metrics(routings) for routings in layers]
        for name in WORST_LAYER:
            metrics[name] = torch.stack([one[name] for one in by_layer]).max()
        metrics |= {name: self.counted(value) for name, value in metrics.items() if name.startswith(COUNTS)}
        named = {f"{name}/layer{layer}": value for layer, one in enumerate(by_layer) for name, value in one.items()}
        return {**super().observe(config, update), **to_floats({**metrics, **named})}

    def evaluate(  # type: ignore[override]
        self, config: Config, model: nn.Module, data: Text, hyper: Hyper
    ) -> dict[str, float]:
        """Held-out surprise, and the routers' logits on the first 64 held-out windows."""
        _, routings = model(data.held_out_NT[:64, :-1])
        logits = {f"val/{name}": value for name, value in logit_metrics(joined(routings)).items()}
        return {**super().evaluate(config, model, data, hyper), **to_floats(logits)}


def parts_of(seen: Seen) -> tuple[Tensor, list[Routing]]:
    """The task's loss, and one routing a layer."""
    return seen.cross_entropy, seen.routings


def _loads(routings: Sequence[Routing]) -> Tensor:
    """Assignments asked for, [L, E]."""
    return torch.stack([expert_load(r.experts_BK, r.logits_BE.shape[-1], r.valid_B) for r in routings])


def _layer_metrics(routings: Sequence[Routing]) -> Mapping[str, Tensor]:
    metrics = router_metrics(routings)
    return {name: value for name, value in metrics.items() if not name.startswith(COUNTS)}
