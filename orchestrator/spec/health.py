"""The sections `health` and `stop`: the limits that checks hold what they see against, and what ends a trial early.

Looks at no finding; whoever runs a trial does.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from orchestrator.spec.document import Node, Scalar, plain_scalar
from orchestrator.spec.domains import is_number
from orchestrator.spec.faces import WorkloadFace
from orchestrator.spec.problems import Problems, nearest, unknown_key
from orchestrator.spec.sections import Section, flag, text, whole
from orchestrator.spec.sweep_spec import SAME_ERROR
from orchestrator.trial import OWN_CHECKS, OWN_EARLY_CHECKS

AT_THE_END = ("unread_field",)
"""Found when nothing is left to be stopped."""

LARGEST = sys.float_info.max
"""What `.inf` is kept as: a limit that nothing reaches, in the numbers that JSON has."""


@runtime_checkable
class Bounded(Protocol):
    """A default, a float, that knows which values make sense in its place."""

    def refusal(self, value: float) -> str:
        """What would be right, in words; empty if `value` is."""


@dataclass(frozen=True)
class Stop:
    """What ends a trial: its divergence, and findings of the checks in `on`.

    And what ends the sweep: so many trials in a row that fail alike.
    """

    diverged: bool = True
    on: tuple[str, ...] = ()
    same_error: int | None = SAME_ERROR
    notes: tuple[str, ...] = field(default=(), compare=False)


def read_stop(node: Node | None, workload: WorkloadFace | None, problems: Problems) -> Stop:
    section = Section.of(node, "stop", ("diverged", "on", "same_error"), problems)
    on = _read_checks(section.entries.get("on"), workload, problems)
    early = (*OWN_EARLY_CHECKS, *(workload.early_checks if workload else ()))
    idle = {check: "when a trial is over" for check in on if check in AT_THE_END}
    idle |= {check: "before training or not at all" for check in on if check in early}
    ends = [check for check in on if check not in idle]
    notes = [f"a trial ends as stopped on {', '.join(ends)}"] if ends else []
    notes += [f"stop.on: {check} is found {when}; it stops none" for check, when in idle.items()]
    return Stop(section.read("diverged", flag, True), on, _read_same_error(section), tuple(notes))


def _read_same_error(section: Section) -> int | None:
    """A number of trials; None for `off` and for null, which here is no absence."""
    node = section.entries.get("same_error")
    if node is not None and node.value in (None, "off") and not node.is_mapping and not node.is_list:
        return None
    return section.read("same_error", _num_alike, SAME_ERROR)


def _num_alike(node: Node) -> int:
    try:
        return whole(1)(node)
    except ValueError as error:
        raise ValueError(f"{error}; or off") from None


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
    if workload is None or name in (known := (*workload.checks, *OWN_CHECKS, *OWN_EARLY_CHECKS)):
        return name
    near = nearest(name, known)
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
    read = {name: section.read(name, limit_like(default), default) for name, default in workload.thresholds.items()}
    return {name: value for name, value in read.items() if value != workload.thresholds[name]}


def limit_like(default: float) -> Callable[[Node], float]:
    """Reads a limit in place of `default`: what that admits, or any finite number from 0 on if it does not say."""

    def convert(node: Node) -> float:
        value = _meant(node.value) if isinstance(node.value, str) else node.value
        if not is_number(value):
            raise ValueError(f"got {node.text or node.plain()}; a number is needed")
        kept = min(value, LARGEST)
        if isinstance(default, Bounded):
            refusal = default.refusal(kept)
        else:
            refusal = "" if 0 <= value <= LARGEST else "a finite number, at least 0"
        if refusal:
            raise ValueError(f"got {node.text}; {refusal}")
        if isinstance(node.value, str):
            raise ValueError(_unquoted(node.value, value))
        return float(kept)

    return convert


def _meant(text: str) -> Scalar:
    """The number that a text stands for, to YAML or to Python (`inf`, `1_0`); the text if it is none."""
    try:
        read = plain_scalar(text)
        return float(text) if read == text else read
    except ValueError:
        return text


def _unquoted(text: str, number: float) -> str:
    if plain_scalar(text) != text:
        return f'got "{text}", a text; write {text}, a number without quotes'
    spelling = ".inf" if number == math.inf else repr(number).removesuffix(".0")
    return f"got {text}, which YAML takes for a text; write {spelling}"


def threshold_notes(thresholds: Mapping[str, float], workload: WorkloadFace | None) -> tuple[str, ...]:
    """What a reader of the plan should know of changed limits."""
    defaults = workload.thresholds if workload else {}
    return tuple(
        f"threshold {name}: {'never' if value == LARGEST else f'{value:g}'}, not {defaults[name]:g}"
        for name, value in thresholds.items()
    )
