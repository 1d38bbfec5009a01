"""The section `unstable`: which results count as unstable besides the diverged ones. Judges no trial; the views do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.spec.document import Node
from orchestrator.spec.domains import Grid, same_value
from orchestrator.spec.faces import WorkloadFace
from orchestrator.spec.params import Params, walk_fields
from orchestrator.spec.problems import Problems, nearest
from orchestrator.spec.relation_parsing import off_axis
from orchestrator.spec.sections import Section, declared_metric, number
from orchestrator.spec.sweep_spec import Unstable

PATH = "unstable"
EXAMPLE = "write unstable: {metric: val/mse, above: 2.0}"

BOUNDS = {"above": number(), "below": number()}
RATIOS = {"above": number(at_least=1), "below": number(above=0, at_most=1)}
"""A ratio beyond these would call the trials that are compared with unstable themselves."""


def read_unstable(
    node: Node | None,
    workload: WorkloadFace | None,
    params: Params,
    problems: Problems,
    zipped: Sequence[Sequence[str]] = (),
) -> Unstable | None:
    """The rule, or None where the file has none; mistakes become problems at their lines."""
    if node is None or node.value is None:
        return None
    section = Section.of(node, PATH, ("metric", *BOUNDS, "relative_to"), problems)
    metric = section.read("metric", declared_metric(workload), "")
    if "metric" not in section.entries:
        problems.add(node.where, PATH, f"needs a metric; {EXAMPLE}")
    reference = section.entries.get("relative_to")
    relative_to = _read_reference(reference, workload, params, problems)
    if reference is not None:
        for group in zipped:
            relative_to |= _moved_along(relative_to, group, params, reference, problems)
    converters = RATIOS if reference is not None else BOUNDS
    bounds = {side: section.read(side, convert, 0.0) for side, convert in converters.items() if side in section.entries}
    if len(bounds) != 1:
        problems.add(node.where, PATH, f"needs one bound, either above or below; {EXAMPLE}")
    side, bound = next(iter(bounds.items()), ("above", 0.0))
    return Unstable(metric, "below" if side == "below" else "above", bound, relative_to)


def _read_reference(
    node: Node | None, workload: WorkloadFace | None, params: Params, problems: Problems
) -> dict[str, Any]:
    """Values of grid axes by name, as the axes hold them."""
    if node is None or workload is None or not params.sound:  # without sound axes every name would look wrong
        return {}
    if not node.entries:
        problems.add(node.where, f"{PATH}.relative_to", "names no axis; write relative_to: {precision: fp32}")
    grids = {name: axis.values for name, axis in params.axes.items() if isinstance(axis, Grid)}
    found: dict[str, Any] = {}
    for name, child in walk_fields(node.entries, workload.fields()):
        path = f"{PATH}.relative_to.{name}"
        if name not in grids:
            near = nearest(name, grids)
            hint = f"did you mean {near}?" if near else f"it has {', '.join(grids) or 'none'}"
            problems.add(child.where, path, f"is no grid axis of this sweep; {hint}")
            continue
        same = [value for value in grids[name] if same_value(value, child.plain())]
        if not same:
            problems.add(child.where, path, off_axis(child.plain(), params.axes[name]))
        found.update((name, value) for value in same)
    return found


def _moved_along(
    named: Mapping[str, Any], group: Sequence[str], params: Params, node: Node, problems: Problems
) -> dict[str, Any]:
    """The values of a whole `zip` group at the one place where its named axes have theirs."""
    given = {name: value for name, value in named.items() if name in group}
    if not given or len(given) == len(group):
        return {}
    grids = {name: axis.values for name, axis in params.axes.items() if name in group and isinstance(axis, Grid)}
    rows = [dict(zip(grids, values, strict=True)) for values in zip(*grids.values(), strict=True)]
    fitting = [row for row in rows if all(same_value(row[name], value) for name, value in given.items())]
    if len(fitting) == 1:
        return fitting[0]
    partners = ", ".join(name for name in group if name not in given)
    problems.add(node.where, f"{PATH}.relative_to", f"fits {len(fitting)} places of its zip; name {partners} too")
    return {}
