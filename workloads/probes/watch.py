"""Watches anybody's training loop from hooks of the model and the optimiser. Changes no number and no line of it.

    health = watch(model, optimizer)  # with a GradScaler: scaler=scaler
    ...  # the loop as it was
    print(health.findings, health.metrics())

What it sees, what it costs and what it cannot see: docs/health.md, "In a loop of your own".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from orchestrator.trial import Finding, Severity, told
from workloads.engine.update import Blocks
from workloads.probes import asked
from workloads.probes.asked import Asked
from workloads.probes.looks import Looks

LOSSES_WITHOUT_STEP = 64  # after so many the scaler is asked whether it still lets any update through
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
    routers: Mapping[str, nn.Module] | None = None,
    k: int | None = None,
    memory: bool = False,
    thresholds: Mapping[str, float] | None = None,
    on_finding: Callable[[Finding], None] = log_finding,
) -> Watch:
    """Begins to watch; `close()`, or the end of a `with`, looks once more and ends it.

    `clip_norm` is what the loop clips the whole gradient to, infinity if it does not; without it only an implausible
    clip is told. `blocks` are the only parameters that are watched, by name. `routers` are modules by name whose output
    (the first, of several) is logits [..., experts], of which a token chooses `k`; a model's own `Router`s are found.
    `memory` asks for what one forward pass keeps for the backward pass, by block. What `on_finding` raises is logged,
    and what the watch raises ends the watch. Raises TypeError or ValueError for arguments that make no sense, all at
    once.
    """
    blocks = asked.with_lists(blocks)
    asked.refuse(
        asked.wrong_parts(model, optimizer, scaler, on_finding),
        asked.wrong_numbers(every, clip_norm, k),
        asked.wrong_blocks(blocks, model, optimizer),
        asked.wrong_routers(routers, k, model),
        asked.wrong_memory(memory, model),
        asked.wrong_thresholds(thresholds),
    )
    model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    wanted = Asked(
        scaler or torch.amp.GradScaler(enabled=False),
        int(every),
        None if clip_norm is None else float(clip_norm),
        blocks,
        dict(asked.chosen_routers(model, routers, k)),
        memory,
        asked.limits(thresholds),
        on_finding,
    )
    return Watch(model, optimizer, wanted)


@dataclass
class Watch:
    """See `watch`. `findings` are those so far: each check once, and again when it gets worse."""

    model: nn.Module
    optimizer: Optimizer
    asked: Asked
    findings: list[Finding] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._is_open, self._is_in_step, self._has_complained = True, False, False
        self._untold: list[Finding] = []
        self._num_since_step = 0
        self._looks = Looks(self.model, self.optimizer, self.asked, self._guarded, self._untold.append)
        steps = self.optimizer
        self._handles = [steps.register_step_pre_hook(self._before), steps.register_step_post_hook(self._after)]
        self._guarded(self._looks.survey)
        self._guarded(self._looks.listen)
        self._tell()

    @property
    def step(self) -> int:
        """Updates so far, skipped ones included; a training that is taken up again sets it."""
        return self._looks.step

    @step.setter
    def step(self, step: int) -> None:
        self._looks.step = step

    def loss(self, loss: Tensor | float, tokens: Tensor | float = 0) -> None:
        """Hands over the loss of a micro-batch or of an update, a scalar, and of how many tokens it is, if you like.

        It is what backward() starts from, as it is or before it is divided by the number of micro-batches. Only of a
        loss that is handed over before its backward pass is it seen what it counts. Raises TypeError for what is no
        real number, ValueError for several.
        """
        value, num_tokens = asked.scalar("loss", loss), asked.scalar("tokens", tokens)
        self._num_since_step += 1
        self._guarded(lambda: self._looks.hand(value, num_tokens))
        if self._num_since_step % LOSSES_WITHOUT_STEP == 0:
            self._guarded(self._looks.catch_up)
            self._tell()

    def held_out(self, loss: Tensor | float) -> None:
        """Hands over a loss of data that is not trained on, to be held against the training loss. Raises as `loss`."""
        value = asked.scalar("held_out", loss)
        self._guarded(lambda: self._looks.hear_held_out(float(value)))
        self._tell()

    def metrics(self) -> dict[str, float]:
        """What the last look has measured, and the last losses. `grad/clipped_share` is that of all looks."""
        return {**self._looks.metrics, **self._looks.heard}

    def close(self) -> None:
        """Looks once more, and removes every hook. Called from `on_finding` it leaves two behind, which do nothing."""
        self._guarded(self._looks.last)
        self._is_open = False
        self._tell()
        self._looks.close()
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
            message = f"the watch failed and sees no more: {told(error)}"
            advice = "the loop goes on; please report it"
            self._untold.append(Finding("probe_failed", Severity.WARNING, message, advice, self.step))

    def _tell(self) -> None:
        """Whom `on_finding` fails, it fails once in the log: a training is not lost for a full disk."""
        while self._untold:
            self.findings.append(self._untold.pop(0))
            try:
                self.asked.on_finding(self.findings[-1])
            except Exception:
                if not self._has_complained:
                    logging.getLogger(__name__).exception("on_finding failed; findings are kept, and the loop goes on")
                self._has_complained = True

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._looks.is_idle:
            return
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self._guarded(lambda: self._looks.before(has_closure=closure is not None))

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._is_in_step, self._num_since_step = True, 0
        try:
            self._guarded(self._looks.after)
            self._tell()
        finally:
            self._is_in_step = False


class WatchingCallback:
    """What a library's callback holds: how to watch, and the watch once training has begun."""

    def __init__(self, **watching: Any) -> None:
        self.watching = watching
        self.health: Watch | None = None

    def begin(self, model: nn.Module, optimizer: Optimizer, step: int, **found: Any) -> None:
        """Watches from `step` on, with what the trainer knows; what it was told by hand goes first."""
        self.health = watch(model, optimizer, **{**found, **self.watching})
        self.health.step = step  # a resumed training goes on counting

    def end(self) -> None:
        """Once or again; findings stay."""
        if self.health:
            self.health.close()

    @property
    def findings(self) -> list[Finding]:
        return self.health.findings if self.health else []
