"""Watches anybody's training loop from hooks of the model and the optimiser. Changes no number and no line of it.

    health = watch(model, optimizer)  # with a GradScaler: scaler=scaler
    ...  # the loop as it was: forward, backward, clip, step, zero_grad
    health.loss(loss)  # if you like: of each micro-batch, or of each update
    print(health.findings, health.metrics())

An update is what ends in `optimizer.step()`. Every `every`-th is looked at, and so are the first two. Norms are those
of the gradient that the last backward pass before the step has left, without the scaler's factor and before any clip.
Where processes share the training, hooks come before their average: norms are then those at the step, after the clip.

Not seen: optimisers that step within the backward pass, and parameters trained in another way than by `.grad`. Several
optimisers of one model take one watch each, told apart by `blocks`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import fmean
from typing import Any, Self

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from orchestrator.trial import Finding, Severity
from workloads.engine.update import Blocks, Call, Hyper, Trainer, Update, gradient_norms
from workloads.probes.arrivals import Arrivals
from workloads.probes.blocks import named_blocks
from workloads.probes.catalogue import Thresholds
from workloads.probes.gradients import GradientProbe, wrongly_clipped
from workloads.probes.health import Health
from workloads.probes.loss import LossProbe
from workloads.probes.probe import Look, Probe, listed

ROUNDING = 1e-3  # relative; what changes a norm by less is no clip
CLIP_TOLERANCE = 0.25  # relative; torch's own clip takes norms in float32, on a CPU wrong by per cents
SMALLEST_CLIP_NORM = 1e-3  # nobody clips to less on purpose
LEVELS = {Severity.INFO: logging.INFO, Severity.WARNING: logging.WARNING, Severity.ERROR: logging.ERROR}


def log_finding(finding: Finding) -> None:
    what = (finding.check_name, finding.step, finding.message, finding.advice)
    logging.getLogger(__name__).log(LEVELS[finding.severity], "%s at update %s: %s; %s", *what)


def watch(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    scaler: torch.amp.GradScaler | None = None,
    every: int = 10,
    clip_norm: float | None = None,
    blocks: Blocks | None = None,
    thresholds: Mapping[str, float] | None = None,
    on_finding: Callable[[Finding], None] = log_finding,
) -> Watch:
    """Begins to watch; `close()`, or the end of a `with`, ends it.

    `clip_norm` is what the loop clips the whole gradient to, infinity if it does not; without it only an implausible
    clip is told. `blocks` are the only parameters that are watched, by name. What `on_finding` raises ends the loop,
    after the update; what the watch raises ends the watch. Raises ValueError for `every` below 1.
    """
    if every < 1:
        raise ValueError(f"every={every}: looks at every so many updates; 1 is each of them")
    return Watch(model, optimizer, scaler, every, clip_norm, blocks, Thresholds(**(thresholds or {})), on_finding)


@dataclass(frozen=True)
class WatchedUpdate(Update):
    """An update of somebody else's loop: `applied_norm` is that of the gradient the optimiser was given, unscaled.

    `losses` are those that became known since the last look: (update, mean over its micro-batches).
    """

    applied_norm: float = math.nan
    losses: Sequence[tuple[int, float]] = ()


NOTHING_SEEN = WatchedUpdate(
    torch.tensor(math.nan), {}, applied=True, clipped=False, num_nonfinite_parameters=0, seen=()
)


def watched(look: Look) -> WatchedUpdate:
    assert isinstance(look.update, WatchedUpdate)
    return look.update


@dataclass
class WatchedLoss(LossProbe):
    """Sees the losses the loop has handed over, at a look: a GPU is not waited for at every update."""

    def updated(self, look: Look) -> Iterator[Finding]:
        for step, loss in watched(look).losses:
            yield from self.see(step, loss)
            if not math.isfinite(loss):
                message, advice = f"the loss is {loss}", "lower lr, clip the gradient, or look at this batch"
                yield Finding("nonfinite_update", Severity.WARNING, message, advice, step)


@dataclass
class WatchedGradients(GradientProbe):
    """Asks for the gradients of `blocks`, and of `strangers` that the optimiser has and the model has not."""

    strangers: Sequence[tuple[str, nn.Parameter]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        trained = {parameter for block in self.blocks.values() for parameter in block}
        self._named = [*((name, one) for name, one in self._named if one in trained), *self.strangers]

    def is_worried(self) -> bool:
        """True where every update counts: a gradient has been missing so far, or was zero at the update before."""
        return self.never is None or bool(self.never or self.zero_for)


@dataclass
class AppliedProbe(Probe):
    """Is what the optimiser was given this update's gradient, finite, and clipped in the right order?"""

    clip_norm: float | None
    knows_scale: bool

    def updated(self, look: Look) -> Iterator[Finding]:
        update = watched(look)
        if update.left_over:
            message = "a gradient of the update before was still there at this one's: it is applied again"
            advice = "call optimizer.zero_grad() once an update, before its first backward pass"
            yield Finding("gradients_not_cleared", Severity.ERROR, message, advice, look.step)
        if not look.thorough or not update.applied:
            return
        if not math.isfinite(update.applied_norm):
            message = f"the gradient that was applied has norm {update.applied_norm}"
            advice = "skip an update whose gradient is not finite; lower lr, or clip"
            yield Finding("nonfinite_update", Severity.ERROR, message, advice, look.step)
        elif update.applied_norm > 0:
            yield from self._in_wrong_order(update, look.step)

    def _in_wrong_order(self, update: WatchedUpdate, step: int) -> Iterator[Finding]:
        before, applied, scale = update.norms["total"], update.applied_norm, update.loss_scale
        if not self.knows_scale and (factor := hidden_scale(before, applied)):
            message = f"gradients are divided by {factor:.0f} between the backward pass and the step"
            advice = "if a GradScaler does it, hand it over (scaler=): norms are not what they seem without it"
            yield Finding("loss_factor", Severity.INFO, message, advice, step, factor, 1.0)
        elif self.clip_norm is not None:
            yield from wrongly_clipped(before, applied, self.clip_norm, CLIP_TOLERANCE, step)
        elif scale > 1 and applied < min(SMALLEST_CLIP_NORM, before / 10):
            message = (
                f"of a gradient of norm {before:.3g}, {applied:.3g} was applied: what a clip to {applied * scale:.3g}"
            )
            message += f" leaves of it when it sees it {scale:.0f} times too large"
            advice = "unscale first (scaler.unscale_), then clip, then step; hand over clip_norm= to be sure"
            yield Finding("clip_order", Severity.WARNING, message, advice, step, applied, SMALLEST_CLIP_NORM)


def hidden_scale(before: float, applied: float) -> float | None:
    """before / applied if that is a power of two from 8 on, as loss scales are; clips do not meet one to six digits."""
    if not math.isfinite(before) or before < 7 * applied:
        return None
    power = math.log2(before / applied)
    return 2.0 ** round(power) if abs(power - round(power)) < 1e-6 else None


@dataclass
class Watch:
    """See `watch`. `findings` are those so far: each check once, and again when it gets worse."""

    model: nn.Module
    optimizer: Optimizer
    scaler: torch.amp.GradScaler | None
    every: int
    clip_norm: float | None
    chosen: Blocks | None
    thresholds: Thresholds
    on_finding: Callable[[Finding], None]
    findings: list[Finding] = field(init=False, default_factory=list)
    step: int = field(init=False, default=0)  # updates so far

    def __post_init__(self) -> None:
        self.model = getattr(self.model, "_orig_mod", self.model)  # what torch.compile has wrapped
        self._is_open, self._is_in_step, self._arrivals = True, False, Arrivals((), set(), self._guarded)
        self._applied: dict[str, float] | None = None
        self._losses: list[tuple[int, Tensor | float]] = []
        self._metrics: dict[str, float] = {}
        self._num_looks = self._num_clipped = 0
        self._untold: list[Finding] = []
        applied = AppliedProbe(self.clip_norm, self.scaler is not None)
        self._probes: list[Probe] = [WatchedLoss(self.thresholds), applied]
        self._health = Health(self._probes, self._untold.append)
        self._known: tuple[list[int], list[int]] | None = None
        self._gradients = WatchedGradients(self.thresholds, self.model, {})
        steps = self.optimizer
        self._handles = [steps.register_step_pre_hook(self._before), steps.register_step_post_hook(self._after)]
        self._guarded(self._survey)
        self._guarded(lambda: self._listen(set()))
        self._tell()

    def loss(self, loss: Tensor | float) -> None:
        """Hands over the loss of a micro-batch or of an update, a scalar."""
        if self._is_open:
            self._losses.append((self.step, loss.detach() if isinstance(loss, Tensor) else loss))

    def metrics(self) -> dict[str, float]:
        """What the last look has measured. `grad/clipped_share` is that of all looks."""
        return dict(self._metrics)

    def close(self) -> None:
        """Removes every hook. Called from `on_finding` it leaves two behind, which do nothing."""
        self._is_open = False
        self._arrivals.close()
        for handle in () if self._is_in_step else self._handles:  # torch is walking over them
            handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _guarded(self, act: Callable[[], None]) -> None:
        """Whatever the watch itself raises ends the watch and not the loop: it came to look."""
        if not self._is_open:
            return
        try:
            act()
        except Exception as error:
            self._is_open = False
            message = f"the watch failed and sees no more: {type(error).__name__}: {error}"
            advice = "the loop goes on; please report it"
            self._health.found(Finding("probe_failed", Severity.WARNING, message, advice, self.step))

    def _tell(self) -> None:
        while self._untold:
            self.findings.append(self._untold.pop(0))
            self.on_finding(self.findings[-1])

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self._guarded(lambda: self._look_before(has_closure=closure is not None))

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._is_in_step = True
        try:
            self._guarded(self._look_after)
            self._tell()
        finally:
            self._is_in_step = False

    def _look_before(self, has_closure: bool) -> None:
        """A closure runs the backward pass within the step: its gradient is looked at behind it."""
        if self._arrivals.handles:
            with self._health.around(self.step + 1):
                self._applied = None if has_closure else self._applied_norms()

    def _applied_norms(self) -> dict[str, float]:
        """Norms of what the optimiser is given. A fused one is given the scale too, if nobody has unscaled before."""
        scale = getattr(self.optimizer, "grad_scale", None)
        return {
            name: norm / float(1 if scale is None else scale) for name, norm in gradient_norms(self._blocks).items()
        }

    def _look_after(self) -> None:
        self.step += 1
        has_seen = bool(self._arrivals.norms)
        if has_seen or self._gradients.is_worried():
            update = self._describe() if has_seen else NOTHING_SEEN
            self._health.updated(Look(self.step, update, (), {}, self._trainer, thorough=has_seen))
            if has_seen:
                self._measure(update)
                self._survey()
        self._arrivals.close()
        if self._is_due(self.step + 1):
            self._listen({one for block in self._blocks.values() for one in block if one.grad is not None})
        else:
            self._arrivals = Arrivals((), set(), self._guarded)

    def _describe(self) -> WatchedUpdate:
        applied = self._applied_norms() if self._applied is None else self._applied
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        norms = applied if is_shared() else self._arrivals.block_norms(self._blocks, scale)
        return WatchedUpdate(
            loss=torch.tensor(math.nan),
            norms=norms,
            applied=not getattr(self.optimizer, "found_inf", False),  # a fused optimiser skips by itself
            clipped=applied["total"] < norms["total"] * (1 - ROUNDING),
            num_nonfinite_parameters=0,
            seen=(),
            loss_scale=scale,
            left_over=self._arrivals.left_over,
            applied_norm=applied["total"],
            losses=self._take_losses(),
        )

    def _take_losses(self) -> list[tuple[int, float]]:
        """The mean loss of each update that is over."""
        over = [(step, float(loss)) for step, loss in self._losses if step < self.step]
        self._losses = [(step, loss) for step, loss in self._losses if step >= self.step]
        by_step = groupby(over, key=lambda pair: pair[0])
        return [(step + 1, fmean(loss for _, loss in pairs)) for step, pairs in by_step]

    def _measure(self, update: WatchedUpdate) -> None:
        self._num_looks, self._num_clipped = self._num_looks + 1, self._num_clipped + update.clipped
        kind = "applied" if is_shared() else "preclip"
        self._metrics = {
            **{f"grad/{kind}/{name}": norm for name, norm in update.norms.items()},
            "grad/applied/total": update.applied_norm,
            "grad/clipped_share": self._num_clipped / self._num_looks,
            **self._health.measured(self.step),
        }
        if self.scaler is not None:
            self._metrics["scaler/scale"] = update.loss_scale
        if update.losses:
            self._metrics["train/loss"] = update.losses[-1][1]

    def _is_due(self, step: int) -> bool:
        """A gradient of zero is looked at until it is known to last: every tenth update may be another task's."""
        is_suspicious = bool(self._gradients.zero_for) and "zero_gradient" not in self._health.said
        return step <= 2 or step % self.every == 0 or is_suspicious

    def _listen(self, had_gradient: set[nn.Parameter]) -> None:
        parameters = [one for block in self._blocks.values() for one in block if one.requires_grad]
        self._arrivals = Arrivals(parameters, had_gradient & set(parameters), self._guarded)

    def _survey(self) -> None:
        """Who is to be watched; again when a parameter came, went, or was frozen."""
        named = [(name, one) for name, one in self.model.named_parameters() if one.requires_grad]
        optimized = [one for group in self.optimizer.param_groups for one in group["params"]]
        known = [id(one) for _, one in named], [id(one) for one in optimized]
        if known == self._known:
            return
        self._known = known
        self._name_blocks(set(optimized))
        self._watch_gradients(optimized)
        if self.chosen is None:
            self._find_untrained([name for name, one in named if one not in set(optimized)])

    def _name_blocks(self, optimized: set[nn.Parameter]) -> None:
        blocks = named_blocks(self.model) if self.chosen is None else self.chosen
        trained = {name: [one for one in block if one in optimized] for name, block in blocks.items()}
        self._blocks = {name: block for name, block in trained.items() if block}
        scaler = self.scaler or torch.amp.GradScaler(enabled=False)
        self._trainer = Trainer(self.model, no_loss, self._blocks, self.optimizer, scaler, self.clip_norm)

    def _watch_gradients(self, optimized: Sequence[nn.Parameter]) -> None:
        own, state = set(self.model.parameters()), self._gradients.state_dict()
        strangers = [
            (f"parameter {place} of the optimiser, which the model does not have", one)
            for place, one in enumerate(optimized)
            if self.chosen is None and one.requires_grad and one not in own
        ]
        self._gradients = WatchedGradients(self.thresholds, self.model, self._blocks, strangers)
        self._gradients.load_state_dict(state)
        self._health.probes = [*self._probes, self._gradients]

    def _find_untrained(self, names: Sequence[str]) -> None:
        if names:
            message = f"the optimiser does not have {len(names)} of the model's parameters: {listed(names)}"
            advice = "add them to it; freeze them (requires_grad_(False)) if they are not to be trained"
            self._health.found(
                Finding("not_optimized", Severity.WARNING, message, advice, self.step, float(len(names)), 0.0)
            )


class WatchingCallback:
    """What a library's callback holds: how to watch, and the watch once training has begun."""

    def __init__(self, **watching: Any) -> None:
        self.watching = watching
        self.health: Watch | None = None

    @property
    def findings(self) -> list[Finding]:
        return self.health.findings if self.health else []


def is_shared() -> bool:
    """True where several processes train one model."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def no_loss(call: Call, batch: Any, hyper: Hyper) -> tuple[Tensor, Any]:
    """Raises AssertionError: the watch updates nothing, the loop does."""
    raise AssertionError("a watched loop has its own loss")
