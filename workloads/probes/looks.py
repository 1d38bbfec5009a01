"""Looks at updates of somebody else's loop: at some thoroughly, at the others for what cannot wait. Raises what fails.

Nothing here is caught: `workloads.probes.watch` is between this and the loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from orchestrator.trial import Finding
from workloads.engine.update import Trainer, count_nonfinite, gradient_norms
from workloads.probes.applied import AppliedProbe, CountedProbe, nonfinite_parameters
from workloads.probes.arrivals import Arrivals, Witness, is_shared
from workloads.probes.asked import Asked
from workloads.probes.foreign_routers import HeardRouters, RouterMetrics, foreign_routers, router_norms
from workloads.probes.handed import HandedLosses, Pace
from workloads.probes.health import Health
from workloads.probes.memory import peak_bytes
from workloads.probes.probe import Look, Probe
from workloads.probes.scale_series import ScaleSeries
from workloads.probes.survey import mark_of, no_loss, survey
from workloads.probes.watched import NOTHING_SEEN, WatchedGradients, WatchedLoss, WatchedScale, WatchedUpdate
from workloads.probes.watched_memory import WatchedMemory

ROUNDING = 1e-3  # relative; what changes a norm by less is no clip


@dataclass
class Looks:
    """What has been seen of the updates so far. Hooks on the model act through `guarded`; findings go to `say`."""

    model: nn.Module
    optimizer: Optimizer
    asked: Asked
    guarded: Callable[[Callable[[], None]], None]
    say: Callable[[Finding], None]
    step: int = field(init=False, default=0)  # updates so far, skipped ones included
    metrics: dict[str, float] = field(init=False, default_factory=dict)  # of the last look
    heard: dict[str, float] = field(init=False, default_factory=dict)  # the last losses

    def __post_init__(self) -> None:
        self._nothing = self.arrivals = Arrivals((), set(), None, self.guarded)
        self.witness = Witness()
        self.losses, self.scale = HandedLosses(self.guarded), ScaleSeries(self.asked.scaler, self.optimizer)
        self.knows_scale = self.asked.scaler.is_enabled()
        self.routers = HeardRouters(self.asked.routers, self.guarded)
        self.has_stepped, self._was_unscaled = False, True
        self._applied: dict[str, float] | None = None
        self._num_skipped = self._num_looks = self._num_clipped = 0
        self.pace = Pace()
        self._make_probes()
        self._mark: Any = None

    def _make_probes(self) -> None:
        limits, knows_scale = self.asked.thresholds, self.knows_scale
        self._loss_probe, self._scale_probe = WatchedLoss(limits), WatchedScale(limits)
        self._memory = [WatchedMemory(limits, self.model, guarded=self.guarded)] if self.asked.memory else []
        self._router_probes = foreign_routers(self.routers, limits)
        self._probes: list[Probe] = [
            self._loss_probe,
            self._scale_probe,
            AppliedProbe(self.asked.clip_norm, knows_scale),
            CountedProbe(limits, knows_scale),
            *self._router_probes,
            *([RouterMetrics(self.routers)] if self._router_probes else []),
            *self._memory,
        ]
        self.health = Health(self._probes, self.say)
        self._gradients = WatchedGradients(limits, self.model, {})

    def survey(self) -> None:
        """Who is to be watched; again when a parameter came, went, or was frozen."""
        if self._mark == (mark := mark_of(self.model, self.optimizer)):
            return
        self._mark = mark
        seen = survey(self.model, self.optimizer, self.asked.blocks)
        self._blocks, state = seen.blocks, self._gradients.state_dict()
        scaler, clip_norm = self.asked.scaler, self.asked.clip_norm
        self._trainer = Trainer(self.model, no_loss, self._blocks, self.optimizer, scaler, clip_norm)
        self._gradients = WatchedGradients(self.asked.thresholds, self.model, self._blocks, seen.strangers)
        self._gradients.load_state_dict(state)
        self.health.probes = [*self._probes, self._gradients]
        if seen.untrained:
            self.health.found(seen.untrained_finding(self.step))

    def listen(self) -> None:
        """To the next update. Whether gradients are left over, one parameter a block tells, but not at the first."""
        parameters = [one for one in self._trainer.parameters if one.requires_grad]
        firsts = (next((one for one in block if one.grad is not None), None) for block in self._blocks.values())
        had_gradient = {one for one in firsts if one is not None and one.requires_grad and self.has_stepped}
        witness = self.witness.parameter
        witness = witness if witness is not None and witness.requires_grad else None
        self.arrivals = Arrivals(parameters, had_gradient, witness, self.guarded)
        self.routers.listen()

    def hand(self, loss: Tensor | float, num_tokens: Tensor | float) -> None:
        ran_back = self.witness.ran_back or bool(self.arrivals.norms)
        self.losses.hand(loss, self.step, self.has_stepped, ran_back)
        self.pace.count(num_tokens)
        if self.arrivals.handles:
            self.losses.hear(loss)

    @property
    def is_idle(self) -> bool:
        """True if nothing is to be done before the next step."""
        return not self.arrivals.handles and not self.knows_scale

    def before(self, has_closure: bool) -> None:
        """A closure runs the backward pass within the step: its gradient is looked at behind it."""
        self._count_skipped()
        if self.arrivals.handles:
            with self.health.around(self.step + 1):
                self._applied = None if has_closure else self._applied_norms()
                self._was_unscaled = has_closure or self.scale.was_unscaled()

    def after(self) -> None:
        """Most updates pass with no more than a count."""
        self.step += 1
        if self.knows_scale:
            self.scale.stepped()
        if self.arrivals.norms:
            self._look()
        elif self._gradients.is_worried():
            self.health.updated(Look(self.step, NOTHING_SEEN, (), {}, self._trainer, thorough=False))
        self.has_stepped, self.witness.ran_back, self._num_skipped = True, False, 0
        if self.arrivals.handles:
            self.arrivals.close()
            self.routers.close()
            self.arrivals = self._nothing
        if self._is_due(self.step + 1):
            self.listen()

    def _look(self) -> None:
        update = self._describe()
        self.health.updated(Look(self.step, update, (), {}, self._trainer, thorough=True))
        self._measure(update)
        self._applied, self._was_unscaled = None, True  # the next step's own, if its hook is still there
        self.witness.choose(self.arrivals)
        self.survey()

    def _count_skipped(self) -> None:
        num_skipped = self.scale.skipped()
        self.step, self._num_skipped = self.step + num_skipped, self._num_skipped + num_skipped

    def _applied_norms(self) -> dict[str, float]:
        """Norms of what the optimiser is given. A fused one is given the scale too, if nobody has unscaled before."""
        scale = getattr(self.optimizer, "grad_scale", None)
        own = float(1 if scale is None else scale)
        return {name: norm / own for name, norm in gradient_norms(self._blocks).items()}

    def _describe(self) -> WatchedUpdate:
        applied = self._applied_norms() if self._applied is None else self._applied
        scale = self.asked.scaler.get_scale()
        norms = applied if is_shared() else self.arrivals.block_norms(self._blocks, scale)
        scaled = norms["total"] * scale
        counted, num_lost = self._counted(scale)
        return WatchedUpdate(
            loss=torch.tensor(math.nan),
            norms=norms,
            applied=not getattr(self.optimizer, "found_inf", False),  # a fused optimiser skips by itself
            clipped=applied["total"] < norms["total"] * (1 - ROUNDING),
            num_nonfinite_parameters=0,  # counted at the end: of a broken one the next loss and gradient tell
            seen=(),
            loss_scale=scale,
            left_over=self.arrivals.left_over,
            applied_norm=applied["total"],
            given_scale=applied["total"] / scaled if 0 < scaled < math.inf else 0.0,
            was_unscaled=self._was_unscaled,
            losses=self.losses.take(self.step),
            fates=self.scale.take(self.step),
            counted=counted,
            num_lost=num_lost,
            router_norms=router_norms(self.asked.routers, self.arrivals, scale),
        )

    def _counted(self, scale: float) -> tuple[list[float], int]:
        """What the losses counted in this update's gradient, and how many of them were cleared before the step.

        In a closure losses are tried, not added up; a skipped update's count nothing by right; and processes that share
        a training may each weigh its own.
        """
        pairs = self.losses.take_counted(scale)
        lost = set() if self.arrivals.is_replaced else set(self.arrivals.lost)
        if self._applied is None or self._num_skipped or is_shared():
            return [], 0
        there = [count for number, count in pairs if number not in lost]
        return ([], len(pairs) - len(there)) if there and len(there) < len(pairs) else (there, 0)

    def _measure(self, update: WatchedUpdate) -> None:
        self._num_looks, self._num_clipped = self._num_looks + 1, self._num_clipped + update.clipped
        kind = "applied" if is_shared() else "preclip"
        self.metrics = {
            **{f"grad/{kind}/{name}": norm for name, norm in update.norms.items()},
            "grad/applied/total": update.applied_norm,
            "grad/clipped_share": self._num_clipped / self._num_looks,
            **self.health.measured(self.step),
            **self.pace.taken(self.step),
        }
        if self.knows_scale:
            self.metrics["scaler/scale"] = update.loss_scale
            self.metrics["scaler/skipped_steps"] = float(self.scale.num_skipped)
        if (peak := peak_bytes(self.model)) is not None:
            self.metrics["memory/peak_bytes"] = float(peak)
        self._note_loss(update)

    def _note_loss(self, update: WatchedUpdate) -> None:
        if update.losses:
            self.heard["train/loss"] = update.losses[-1][1]

    def _is_due(self, step: int) -> bool:
        """A gradient of zero is looked at until it is known to last: every tenth update may be another task's."""
        if step % self.asked.every == 0 or self._num_looks < 2:
            return True
        if self._gradients.zero_for and "zero_gradient" not in self.health.said:
            return True
        return any(one.zero_for for one in self._router_probes) and "dead_router" not in self.health.said

    def hear_held_out(self, loss: float) -> None:
        self.heard["val/loss"] = loss
        self.catch_up()
        for finding in self._loss_probe.hear_held_out(self.step, loss):
            self.health.found(finding)

    def last(self) -> None:
        self.catch_up(is_over=True)
        if num := count_nonfinite(self._trainer.parameters):
            self.health.found(nonfinite_parameters(num, self.step))

    def catch_up(self, is_over: bool = False) -> None:
        """Hears the losses that are over and the fates of skipped updates, between two looks."""
        self._count_skipped()
        losses, fates = self.losses.take(self.step, is_over), self.scale.take(self.step)
        update = replace(NOTHING_SEEN, losses=losses, fates=fates)
        look = Look(self.step, update, (), {}, self._trainer, thorough=False)
        for probe in (self._loss_probe, self._scale_probe):
            for finding in probe.updated(look):
                self.health.found(finding)
        self._note_loss(update)

    def close(self) -> None:
        self.arrivals.close()
        self.routers.close()
        self.witness.close()
        for probe in self._memory:
            probe.close()
