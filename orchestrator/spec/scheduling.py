"""The section `scheduler`: who may stop a trial early, and whether that fits the rest of the sweep. Judges no trial."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from orchestrator.spec.document import Node
from orchestrator.spec.domains import Domain, Grid, ends, is_number
from orchestrator.spec.faces import FieldFace
from orchestrator.spec.points import linked_axes
from orchestrator.spec.problems import Problems, nearest
from orchestrator.spec.sections import Section, number, shown, text, whole, word
from orchestrator.spec.sweep_spec import STEPS, Schedule, SweepSpec

PATH = "scheduler"
KEYS = {
    "none": (),
    "asha": ("max_steps", "grace_steps", "reduction_factor"),
    "median": ("max_steps", "grace_steps"),
    "hyperband": ("max_steps", "grace_steps", "reduction_factor"),
    "pbt": ("max_steps", "interval_steps", "quantile", "perturb", "seed"),
}
"""What each algorithm reads besides its name. `none` lets the settings of another one stand: it is switched off."""

SETTINGS = tuple(dict.fromkeys(key for keys in KEYS.values() for key in keys))
ALL_KEYS = ("algorithm", *SETTINGS)


def read_schedule(node: Node | None, problems: Problems) -> Schedule:
    """The section by itself; `check_schedule` holds it against the axes."""
    section = Section.of(node, PATH, ALL_KEYS, problems)
    algorithm = section.read("algorithm", word(*KEYS), "none")
    if section.entries and "algorithm" not in section.entries and node:
        problems.add(node.where, PATH, f"needs an algorithm: {', '.join(KEYS)}")
    elif algorithm != "none":
        for key in section.entries.keys() & set(ALL_KEYS) - {"algorithm", *KEYS[algorithm]}:
            message = f"{algorithm} does not use {key}; it has {', '.join(KEYS[algorithm])}"
            problems.add(section.entries[key].where, f"{PATH}.{key}", message)
    read = Schedule(
        max_steps=section.read("max_steps", whole(1), None),
        grace_steps=section.read("grace_steps", whole(1), Schedule.grace_steps),
        reduction_factor=section.read("reduction_factor", number(above=1), Schedule.reduction_factor),
        interval_steps=section.read("interval_steps", whole(1), None),
        quantile=section.read("quantile", number(above=0, at_most=0.5), Schedule.quantile),
        perturb=section.read("perturb", _names, ()),
        seed=section.read("seed", whole(0), Schedule.seed),
    )
    if algorithm == "none":
        return Schedule()
    return Schedule(**{**vars(read), "algorithm": algorithm})


def _names(node: Node) -> tuple[str, ...]:
    if not node.is_list or not node.items:
        raise ValueError(f"{shown(node)} is no list of names; write perturb: [lr]")
    return tuple(dict.fromkeys(text(item) for item in node.items))


def check_schedule(
    spec: SweepSpec, fields: Mapping[str, FieldFace], where: Callable[[str], str], problems: Problems
) -> tuple[str, ...]:
    """Adds what does not fit the sweep; returns what a reader of the plan should know."""
    schedule = spec.schedule
    if schedule.algorithm == "none":
        return ()

    def refuse(key: str, message: str) -> None:
        path = f"{PATH}.{key}".rstrip(".")
        problems.add(where(path), path, message)

    if spec.more_metrics:
        refuse("", f"{schedule.algorithm} judges by one metric, and metric lists {len(spec.objectives)}")
    steps = _steps_asked(spec, fields)
    last = schedule.max_steps or steps
    if last is None:
        refuse("max_steps", f"is missing, and {spec.workload} has no field steps that would say it")
        return ()
    until = last if steps is None else min(last, steps)  # where trials end
    if schedule.algorithm == "pbt":
        for key, message in _wrong_population(spec, fields, until):
            refuse(key, message)
    elif schedule.grace_steps > until:
        refuse("grace_steps", f"nobody is judged before step {schedule.grace_steps}, but trials end at step {until}")
    notes = [] if schedule.algorithm == "pbt" else _unjudged(spec, until)
    if steps is not None and last != steps:
        end = f"after {steps} steps" if steps < last else f"at step {last} of {steps}, by the scheduler"
        notes.append(f"{PATH}.max_steps is {last}, params.steps is {steps}: trials end {end}")
    return tuple(notes)


def _unjudged(spec: SweepSpec, until: int) -> list[str]:
    """That trials, which end at step `until`, report nothing before on which they could be stopped."""
    grace_steps, log_every = spec.schedule.grace_steps, spec.log_every
    if (until - 1) // log_every * log_every >= grace_steps:
        return []
    since = f" from step {grace_steps} on" if grace_steps > 1 else ""
    reports = f"trials report every log_every = {log_every} steps and end at step {until}"
    return [f"{PATH}: nobody can be stopped: {reports}, so that none is judged{since} before"]


def _steps_asked(spec: SweepSpec, fields: Mapping[str, FieldFace]) -> int | None:
    """The largest number of steps that a trial asks for; None where the workload has no such field."""
    if STEPS not in fields:
        return None
    asked = ends(spec.axes.get(STEPS, spec.fixed.get(STEPS, fields[STEPS].default)))
    return max((value for value in asked if isinstance(value, int)), default=None)


def _wrong_population(spec: SweepSpec, fields: Mapping[str, FieldFace], until: int) -> Iterator[tuple[str, str]]:
    """(key, message) of what keeps trials from learning from each other."""
    schedule = spec.schedule
    given = {key for key in ALL_KEYS if f"{PATH}.{key}" in spec.lines}  # what is wrong by itself was told already
    if schedule.interval_steps is None and "interval_steps" not in given:
        yield "interval_steps", f"is missing; pbt looks at the population every so often, such as {max(1, until // 10)}"
    elif schedule.interval_steps and schedule.interval_steps >= until:
        yield "interval_steps", f"nobody looks before step {schedule.interval_steps}, but trials end at step {until}"
    elif schedule.interval_steps and schedule.interval_steps % spec.log_every:
        near = max(1, round(schedule.interval_steps / spec.log_every)) * spec.log_every
        yield "interval_steps", f"trials report every log_every = {spec.log_every} steps only; write {near}"
    if spec.search.algorithm == "optuna":
        yield "", "pbt needs its whole population from the start, but optuna waits for results; write algorithm: random"
    elif (spec.search.samples or 1) * len(spec.seeds or (None,)) < 2:
        yield "", "the trials of a cell are a population, and here each has one: write more samples or seeds"
    if not schedule.perturb and "perturb" not in given:
        candidates = [name for name in spec.sampled_axes if fields[name].fusible]
        yield "perturb", f"is missing; name the axes that pbt may change, such as [{', '.join(candidates) or 'lr'}]"
    for name in schedule.perturb:
        if why := _unperturbable(name, spec, fields):
            yield "perturb", f"{name} {why}"


def _unperturbable(name: str, spec: SweepSpec, fields: Mapping[str, FieldFace]) -> str | None:
    """Why pbt cannot change this axis while a trial trains; None if it can."""
    axis = spec.axes.get(name)
    if axis is None:
        near = nearest(name, spec.axes)
        hint = f"did you mean {near}?" if near else f"it has {', '.join(spec.axes) or 'none'}"
        return f"is no axis of this sweep; {hint}"
    if isinstance(axis, Grid):
        return "is a grid axis, by which trials are compared; write a range or a choice"
    if not fields[name].fusible:
        return "is structural: it cannot change while a trial trains"
    if not _holds_numbers(axis):
        return "has values that are no numbers"
    if name in linked_axes(spec):
        return "is tied to others by when or exclude; it must be free to change"
    return None


def _holds_numbers(axis: Domain) -> bool:
    return all(map(is_number, ends(axis)))
