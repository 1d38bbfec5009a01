"""The sections `health` and `stop`: the limits that checks hold what they see against, and what ends a trial early.

Looks at no finding; whoever runs a trial does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.spec.document import Node
from orchestrator.spec.faces import WorkloadFace
from orchestrator.spec.problems import Problems, nearest, unknown_key
from orchestrator.spec.sections import Section, flag, number, text
from orchestrator.trial import OWN_CHECKS

AT_THE_END = ("unread_field",)
"""Found when nothing is left to be stopped."""


@dataclass(frozen=True)
class Stop:
    """What ends a trial: its divergence, and findings of the checks in `on`."""

    diverged: bool = True
    on: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)


def read_stop(node: Node | None, workload: WorkloadFace | None, problems: Problems) -> Stop:
    section = Section.of(node, "stop", ("diverged", "on"), problems)
    on = _read_checks(section.entries.get("on"), workload, problems)
    late = [f"stop.on: {check} is found when a trial is over; it stops none" for check in on if check in AT_THE_END]
    ends = [check for check in on if check not in AT_THE_END]
    notes = [f"a trial ends as stopped on {', '.join(ends)}"] if ends else []
    return Stop(section.read("diverged", flag, True), on, (*notes, *late))


def _read_checks(node: Node | None, workload: WorkloadFace | None, problems: Problems) -> tuple[str, ...]:
    """The names in `stop.on`, each once; one that the workload cannot find is a problem at its line."""
    if node is None or node.value is None:
        return ()
    if not node.is_list:
        problems.add(node.where, "stop.on", "is no list; write on: [loss_spike]")
    checks: dict[str, None] = {}
    for item in node.items:
        try:
            checks[_known_check(item, workload)] = None
        except ValueError as error:
            problems.add(item.where, "stop.on", str(error))
    return tuple(checks)


def _known_check(node: Node, workload: WorkloadFace | None) -> str:
    name = text(node)
    if workload is None or name in workload.checks or name in OWN_CHECKS:
        return name
    near = nearest(name, (*workload.checks, *OWN_CHECKS))
    if near:
        raise ValueError(f"unknown check {name}, did you mean {near}?")
    declared = ", ".join(workload.checks) or "none (an own workload lists them in `checks`)"
    raise ValueError(f"unknown check {name}; {workload.name} declares {declared}")


def read_thresholds(node: Node | None, workload: WorkloadFace | None, problems: Problems) -> dict[str, float]:
    """`health: {thresholds: {spike_sigmas: 8}}`, without those that equal the default: they change nothing."""
    path = "health.thresholds"
    given = Section.of(node, "health", ("thresholds",), problems).entries.get("thresholds")
    if workload is None or given is None or given.value is None:
        return {}
    if not workload.thresholds:
        hint = f"{workload.name} has no thresholds (an own workload declares them in `thresholds`); remove this"
        problems.add(given.where, path, hint)
        return {}
    if not given.is_mapping:
        problems.add(given.where, path, "is no mapping; write thresholds: {name: number}")
    section = Section(path, given.entries, problems)
    for name, child in given.entries.items():
        if name not in workload.thresholds:
            problems.add(child.where, f"{path}.{name}", unknown_key(f"{path}.{name}", workload.thresholds))
    read = {name: section.read(name, number(at_least=0), default) for name, default in workload.thresholds.items()}
    return {name: value for name, value in read.items() if value != workload.thresholds[name]}


def threshold_notes(thresholds: Mapping[str, float], workload: WorkloadFace | None) -> tuple[str, ...]:
    """What a reader of the plan should know of changed limits."""
    defaults = workload.thresholds if workload else {}
    return tuple(f"threshold {name}: {value:g}, not {defaults[name]:g}" for name, value in thresholds.items())
