"""Which scheduler a spec asks for."""

from __future__ import annotations

from orchestrator.errors import OrchError
from orchestrator.schedulers.median import MedianStopping
from orchestrator.schedulers.milestones import Unscheduled
from orchestrator.schedulers.population import PopulationBasedTraining
from orchestrator.schedulers.rungs import SuccessiveHalving
from orchestrator.schedulers.scheduler import Scheduler
from orchestrator.spec.domains import ends
from orchestrator.spec.sweep_spec import STEPS, SweepSpec
from orchestrator.workload import describe


def make_scheduler(spec: SweepSpec, num_trials: int | None = None) -> Scheduler:
    """A fresh scheduler; begin and replay what is known, and it goes on where that ended.

    `num_trials` is how many the sweep will have (`search.plan_count`): a population waits for those that did not begin.
    """
    schedule = spec.schedule
    if schedule.algorithm == "none":
        return Unscheduled()
    default_steps, max_steps = steps_unless_swept(spec), schedule.max_steps or steps_asked(spec)
    if schedule.algorithm == "median":
        return MedianStopping(spec, max_steps, default_steps)
    if schedule.algorithm == "pbt":
        return PopulationBasedTraining(spec, max_steps, default_steps, num_trials or 0)
    return SuccessiveHalving(spec, max_steps, default_steps)


def steps_asked(spec: SweepSpec) -> int:
    """How long the longest trial trains. Raises OrchError for a workload that does not say by a field `steps`."""
    if axis := spec.axes.get(STEPS):
        return int(max(ends(axis)))
    default_steps = steps_unless_swept(spec)
    if default_steps is None:
        raise OrchError(
            f"scheduler.max_steps  needed: {spec.workload} has no field {STEPS!r} that says how long it trains"
        )
    return default_steps


def steps_unless_swept(spec: SweepSpec) -> int | None:
    """The field `steps` of trials whose parameters do not have it: the file's value, or else the workload's default."""
    if STEPS in spec.axes:
        return None
    if STEPS in spec.fixed:
        return int(spec.fixed[STEPS])
    field = describe(spec.workload).fields().get(STEPS)
    return None if field is None else int(field.default)
