"""Turns routings and updates into metrics. Changes nothing it looks at."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from workloads.engine.precision import at_least_float32
from workloads.engine.update import Scalar, Update
from workloads.layers.router import Routing, expert_load, router_z_loss, tie_share
from workloads.moe_router.model import MoeRegression
from workloads.moe_router.task import Batch


@torch.no_grad()
def evaluate(model: MoeRegression, held_out: Batch, offset: Scalar) -> dict[str, float]:
    """Error and logits on rows that no training batch holds. No token is dropped, whatever the capacity."""
    model.eval()
    prediction_NO, routing = model(held_out.inputs_NI, offset)
    model.train()
    mse = (prediction_NO.double() - held_out.targets_NO.double()).square().mean()
    return _to_floats({"val/mse": mse, **{f"val/{name}": value for name, value in _logit_metrics(routing).items()}})


@torch.no_grad()
def router_metrics(routings: Sequence[Routing], k: int) -> dict[str, float]:
    """The router's state over a whole window of micro-batches."""
    routing = Routing(*(torch.cat(parts) for parts in zip(*routings, strict=True)))
    load_E = expert_load(routing.experts_BK, routing.logits_BE.shape[-1]).double()
    shares = {f"router/load/{expert}": share for expert, share in enumerate(load_E / load_E.sum())}
    kept = routing.kept_BK.double()
    return _to_floats(
        {
            **_logit_metrics(routing),
            **shares,
            "router/load_max_over_mean": load_E.max() / load_E.mean(),
            "router/dropped_share": 1.0 - kept.mean(),
            "router/tie_share": tie_share(routing.logits_BE, k),
            "router/assignments": kept.sum(),
        }
    )


def _logit_metrics(routing: Routing) -> dict[str, Tensor]:
    logits_BE = at_least_float32(routing.logits_BE)
    return {
        "router/z": router_z_loss(logits_BE),
        "router/max_logit": logits_BE.amax(-1).mean(),
        "router/abs_max_logit": logits_BE.abs().amax(),
    }


def _to_floats(metrics: dict[str, Tensor]) -> dict[str, float]:
    values = torch.stack([value.double() for value in metrics.values()]).tolist()  # one transfer from the device
    return dict(zip(metrics, values, strict=True))


@dataclass
class Tally:
    """What happened since the last report, and what is counted from the start."""

    num_updates: int = 0
    num_clipped: int = 0
    seconds: float = 0.0
    skipped_steps: int = 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started

    def add(self, update: Update) -> None:
        self.num_updates += 1
        self.num_clipped += update.clipped
        self.skipped_steps += not update.applied

    def take(self) -> dict[str, float]:
        """The metrics of the interval that ends here; the next one starts."""
        metrics = {
            "grad/clipped_share": self.num_clipped / self.num_updates,
            "time/step_seconds": self.seconds / self.num_updates,
            "update/skipped_steps": float(self.skipped_steps),
        }
        self.num_updates, self.num_clipped, self.seconds = 0, 0, 0.0
        return metrics
