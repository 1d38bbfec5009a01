"""Runs the checks of a training workload. A check that fails becomes a finding, and the others go on.

A workload without data, model or loss is not checked at all: what it raises is raised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from orchestrator.trial import Finding, Severity, told
from orchestrator.workload import Context
from workloads.checks import evaluation, language, routers, updates
from workloads.checks.subject import Subject
from workloads.engine.random import with_own_globals

if TYPE_CHECKING:  # the engine imports the checks
    from workloads.engine.training import TrainingWorkload

Check = Callable[[Subject], Iterable[Finding]]

CHECKS: tuple[Check, ...] = (
    updates.check_reachable,
    updates.check_optimized,
    updates.check_loss_factor,
    updates.check_slope,
    updates.check_accumulation,
    updates.check_cleared,
    updates.check_clip,
    updates.check_schedule,
    language.check_future,
    language.check_targets,
    language.check_padding,
    routers.check_z_loss,
    routers.check_balance_loss,
    routers.check_window_load,
    routers.check_dead_router,
    routers.check_router_dtype,
    evaluation.check_held_out,
    evaluation.check_evaluation,
)


def check_training(workload: TrainingWorkload, config: Any, context: Context) -> Iterator[Finding]:
    """What is wrong with a workload under a config; nothing for what is right. Leaves no trace in the process."""
    yield from with_own_globals(_run(Subject(workload, config, context)), context.seed("checks"))


def _run(subject: Subject) -> Generator[Finding]:
    loss, _ = subject.loss(subject.model(), subject.batch)
    yield from _first_loss(loss)
    if not loss.requires_grad:
        return  # nothing to experiment on
    for check in (*CHECKS, own_checks):
        try:
            yield from check(subject)
        except (Exception, SystemExit) as error:  # the boundary between somebody's workload and its judge
            message = f"{check.__name__} failed: {told(error)}"
            yield Finding("check_failed", Severity.WARNING, message, "the other checks were made; look at this one")


def own_checks(subject: Subject) -> Iterable[Finding]:
    return subject.workload.own_checks(subject.config, subject.context)


def _first_loss(loss: Tensor) -> Iterator[Finding]:
    if not loss.requires_grad:
        message = "the loss of the first batch depends on nothing that is trained: no update can be made"
        advice = "look for detach() or no_grad() around the model, and for parameters that are all frozen"
        yield Finding("no_gradient", Severity.ERROR, message, advice)
    if not math.isfinite(value := loss.item()):
        message = f"the loss of the first batch is {value} before anything is trained; most checks need a finite one"
        advice = "look at the initial weights, the data and the precision"
        yield Finding("nonfinite_update", Severity.WARNING, message, advice, None, value)
