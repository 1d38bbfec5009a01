"""Tells which `when` and `exclude` do nothing, and refuses points to try first that are excluded. Expands nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.spec.domains import Choice, can_be_drawn, contains
from orchestrator.spec.points import Point, factors_of, linked_axes, num_combinations, settled_points
from orchestrator.spec.problems import Problems
from orchestrator.spec.relations import excluded, holds, is_active, settled
from orchestrator.spec.sweep_spec import Condition, SweepSpec
from orchestrator.spec.yaml_text import as_written, flow

MAX_LISTED = 100_000  # combinations of the axes that are tied together; beyond, idle ones are not looked for


def check_relations(spec: SweepSpec, problems: Problems) -> tuple[str, ...]:
    """Notes on conditions and exclusions without effect."""
    for point in spec.search.enqueue:
        if excluded(spec, settled(spec, point)):
            problems.add(spec.where("search.enqueue"), "search.enqueue", f"{flow(point)} is excluded")
    if not spec.when and not spec.exclude:
        return ()
    notes = tuple(_never_drawn(spec))
    factors = factors_of(spec, linked_axes(spec))
    if num_combinations(factors) > MAX_LISTED:
        return notes
    points = [{**spec.fixed, **point} for point in settled_points(spec, factors)]
    return (*notes, *_idle_conditions(spec, points), *_idle_exclusions(spec, points))


def _never_drawn(spec: SweepSpec) -> Iterator[str]:
    """Conditions on single values of a range: these stand for it when points are listed, but no draw will meet them."""
    named = [*((f"when.{axis}", when.condition) for axis, when in spec.when.items())]
    for path, condition in [*named, *(("exclude", entry) for entry in spec.exclude)]:
        for name in condition.keys() & spec.axes.keys():
            undrawn = [point[name] for point in spec.search.enqueue if name in point]
            undrawn += [spec.when[name].otherwise] if name in spec.when else []
            possible = Choice((spec.axes[name], *undrawn))
            options = [value for value in condition[name] if contains(possible, value)]
            if options and not any(can_be_drawn(possible, value) for value in options):
                why = f"{name} is drawn from a range, and no draw meets one value of it; give it a step, or a choice"
                yield f"{path}: {_said(condition)} practically never holds: {why}"


def _idle_conditions(spec: SweepSpec, points: Sequence[Point]) -> Iterator[str]:
    for axis, when in spec.when.items():
        num_active = sum(is_active(spec, axis, point) for point in points)
        if num_active == 0:
            yield f"when.{axis}: {_said(when.condition)} never holds; {axis} stays at {flow(when.otherwise)}"
        elif num_active == len(points):
            yield f"when.{axis}: {_said(when.condition)} always holds"


def _idle_exclusions(spec: SweepSpec, points: Sequence[Point]) -> Iterator[str]:
    return (
        f"exclude: {_said(entry)} matches no point"
        for entry, keys in zip(spec.exclude, spec.exclude_keys, strict=True)
        if not any(holds(keys, point) for point in points)
    )


def _said(condition: Condition) -> str:
    return flow(as_written(condition))
