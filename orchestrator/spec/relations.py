"""What `when` and `exclude` mean for values: pure predicates. Expands no space; `search/searcher.py` does.

`values` are of axes, by name; fixed fields are known from the spec. A name that has no value yet matches nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.spec.domains import quick_key
from orchestrator.spec.sweep_spec import Keys, SweepSpec, When


def holds(condition: Keys, values: Mapping[str, Any]) -> bool:
    """True if every name of the condition has one of its values."""
    for name, options in condition.items():  # a plain loop: a plan asks a hundred thousand times
        if name not in values or quick_key(values[name]) not in options:
            return False
    return True


def is_active(spec: SweepSpec, axis: str, values: Mapping[str, Any]) -> bool:
    """True if `axis` exists where `values` hold, which must be settled as far as its condition goes."""
    when = spec.when.get(axis)
    return when is None or holds(when.keys, {**spec.fixed, **values})


def settled(spec: SweepSpec, values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `values` with every inactive axis at its `otherwise`, whether it had a value or none.

    Of a part of a point (a cell, say) only what this part decides is settled; the whole point settles the rest.
    """
    result = dict(values)
    if not spec.when:
        return result
    known = {**spec.fixed, **values}
    for axis, when in spec.when.items():
        if any(name in known and quick_key(known[name]) not in options for name, options in when.keys.items()):
            result[axis] = known[axis] = when.otherwise
        elif any(name not in known for name in when.condition):
            known.pop(axis, None)  # what depends on it is undecided too
    return result


def excluded(spec: SweepSpec, values: Mapping[str, Any]) -> bool:
    """True if the settled point matches an entry of `exclude`; one that names what has no value yet does not match."""
    if not spec.exclude:
        return False
    known = {**spec.fixed, **values}
    return any(holds(one, known) for one in spec.exclude_keys)


def conditions_first(axes: Iterable[str], when: Mapping[str, When]) -> list[str]:
    """The axes, each after those that its condition names. Raises ValueError, telling the ring, for a cycle."""
    axes = list(axes)
    ordered: dict[str, None] = {}

    def visit(axis: str, path: tuple[str, ...]) -> None:
        if axis in path:
            raise ValueError(" -> ".join([*path[path.index(axis) :], axis]))
        if axis in ordered:
            return
        for name in when[axis].condition if axis in when else ():
            visit(name, (*path, axis))
        ordered[axis] = None

    for axis in axes:
        visit(axis, ())
    return [axis for axis in ordered if axis in axes]
