"""Turns routings into metrics: a whole window at a time, valid tokens only. Changes nothing it looks at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from workloads.engine.precision import at_least_float32
from workloads.layers.router import Routing, router_z_loss, tie_share

Metrics = dict[str, Tensor]


def joined(routings: Sequence[Routing]) -> Routing:
    """The routing of all valid tokens of several micro-batches."""
    several = len(routings) > 1
    routing = Routing(*(torch.cat(parts) for parts in zip(*routings, strict=True))) if several else routings[0]
    return routing if bool(routing.valid_B.all()) else Routing(*(part[routing.valid_B] for part in routing))


def load_metrics(routing: Routing) -> Metrics:
    """Who got how much. `load` counts what was asked for; full experts drop assignments."""
    load_E = torch.bincount(routing.experts_BK.flatten(), minlength=routing.logits_BE.shape[-1]).double()
    kept = routing.kept_BK.double()
    return {
        **{f"router/load/{expert}": share for expert, share in enumerate(load_E / load_E.sum())},
        "router/load_max_over_mean": load_E.max() / load_E.mean(),
        "router/dead_experts": (load_E == 0).sum().double(),
        "router/dropped_share": 1.0 - kept.mean(),
        "router/assignments": kept.sum(),
    }


def logit_metrics(routing: Routing) -> Metrics:
    """How large the logits are: rounding harms large ones, and the z-loss keeps them small."""
    logits_BE = at_least_float32(routing.logits_BE)
    return {
        "router/z": router_z_loss(logits_BE),
        "router/mean_logit": logits_BE.mean(),
        "router/max_logit": logits_BE.amax(-1).mean(),
        "router/abs_max_logit": logits_BE.abs().amax(),
        "router/logit_spacing": spacing(routing.logits_BE.abs().amax()),
    }


def spacing(value: Tensor) -> Tensor:
    """The distance from `value`, at least 0, to the next larger number of its dtype: what a choice can hinge on."""
    return (torch.nextafter(value, torch.full_like(value, torch.inf)) - value).double()


def entropy(probabilities_BE: Tensor) -> Tensor:
    """Mean entropy of a token's probabilities over that of an even choice: 1 is undecided, 0 is certain."""
    num_experts = probabilities_BE.shape[-1]
    probabilities_BE = probabilities_BE.double()
    nats: Tensor = torch.special.entr(probabilities_BE).sum(-1).mean()
    return nats / math.log(num_experts) if num_experts > 1 else nats


def router_metrics(routings: Sequence[Routing]) -> Metrics:
    """The router's state over a whole window of micro-batches."""
    routing = joined(routings)
    return {
        **logit_metrics(routing),
        **load_metrics(routing),
        "router/entropy": entropy(routing.probabilities_BE),
        "router/tie_share": tie_share(routing.logits_BE, routing.experts_BK.shape[-1]),
    }


def to_floats(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    values = torch.stack([value.detach().double() for value in metrics.values()]).tolist()  # one transfer
    return dict(zip(metrics, values, strict=True))
