"""The sections `when`, `zip`, `exclude` and `search.enqueue`: what they say of axes and their values. Expands nothing.

Whatever they name is an axis or a fixed field of `params`; its values are those it can take, in its declared type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.spec.document import Node
from orchestrator.spec.domains import Choice, Domain, Grid, contains, ends, is_number, last_value, same_value
from orchestrator.spec.faces import FieldFace, accepts
from orchestrator.spec.params import Params, walk_fields
from orchestrator.spec.problems import Problems, nearest
from orchestrator.spec.relations import conditions_first
from orchestrator.spec.sections import shown
from orchestrator.spec.sweep_spec import SEED, When

REPLICATE = "is a replicate: every configuration is trained with each seed"


@dataclass
class Relations:
    """What ties the axes of a sweep together."""

    when: dict[str, When] = field(default_factory=dict)
    zipped: tuple[tuple[str, ...], ...] = ()
    exclude: tuple[dict[str, tuple[Any, ...]], ...] = ()
    enqueue: tuple[dict[str, Any], ...] = ()
    sound: bool = True  # False after a mistake in one of them


@dataclass
class RelationReader:
    """Reads the sections against `params`; a fixed field with a `when` becomes an axis there."""

    fields: Mapping[str, FieldFace]
    params: Params
    problems: Problems
    defaults: dict[str, Any] = field(default_factory=dict)  # of the axes with a `when`: what they are elsewhere

    def read(self, entries: Mapping[str, Node], enqueue: Node | None) -> Relations:
        before = len(self.problems)
        when = self._when(entries.get("when"))
        zipped = tuple(self._groups(entries.get("zip")))
        exclude = tuple(self._excluded(entries.get("exclude")))
        enqueued = tuple(self._enqueued(enqueue))
        return Relations(when, zipped, exclude, enqueued, sound=len(self.problems) == before)

    # --- when -------------------------------------------------------------------------------------------------------

    def _when(self, node: Node | None) -> dict[str, When]:
        entries = self._entries(node, "when", "when: {router_offset: {precision: bf16}}")
        conditional = {
            name: child for name, child in walk_fields(entries, self.fields) if self._may_depend(name, child)
        }
        self.defaults |= {name: self._default(name, child) for name, child in conditional.items()}
        found: dict[str, When] = {}
        for name, child in conditional.items():
            path = f"when.{name}"
            condition = self._condition(child, path)
            if SEED in condition:
                self.problems.add(child.where, path, f"names seed, which {REPLICATE}")
            elif condition:
                found[name] = When(condition, self.defaults[name])
        return self._in_order(found, conditional)

    def _may_depend(self, name: str, node: Node) -> bool:
        """Whether a condition can be put on this name. One fixed value then is an axis of one."""
        path = f"when.{name}"
        if node.value is None:
            return False
        if name == SEED:
            self.problems.add(node.where, path, REPLICATE)
        elif self._is_known(name, node, path):
            if name in self.params.fixed:
                self.params.axes[name] = Grid((self.params.fixed.pop(name),))
            return True
        return False

    def _default(self, name: str, node: Node) -> Any:
        face = self.fields[name]
        if face.required:
            self.problems.add(node.where, f"when.{name}", "has no default to be where the condition does not hold")
            return None
        try:
            return face.check(face.default)
        except ValueError as error:
            message = f"its default {face.default!r} is no legal value, so that it cannot be elsewhere: {error}"
            self.problems.add(node.where, f"when.{name}", message)
            return None

    def _in_order(self, found: Mapping[str, When], places: Mapping[str, Node]) -> dict[str, When]:
        try:
            return {name: found[name] for name in conditions_first(found, found)}
        except ValueError as error:
            name = str(error).partition(" -> ")[0]
            self.problems.add(places[name].where, f"when.{name}", f"depends on itself: {error}")
            return {}

    # --- zip --------------------------------------------------------------------------------------------------------

    def _groups(self, node: Node | None) -> Iterator[tuple[str, ...]]:
        taken: dict[str, Node] = {}
        for item in self._items(node, "zip", "zip: [[batch_size, accumulation_steps]]"):
            if not item.is_list or len(item.items) < 2:
                hint = "name two axes or more in a list of their own: zip: [[batch_size, accumulation_steps]]"
                self.problems.add(item.where, "zip", f"{shown(item)}: {hint}")
                continue
            group = tuple(one.text for one in item.items)
            if all([self._may_move(one, taken) for one in item.items]) and self._are_equally_long(item, group):
                yield group

    def _may_move(self, node: Node, taken: dict[str, Node]) -> bool:
        name, axes = node.text, self.params.axes
        if not self._is_known(name, node, "zip"):
            return False
        if name in taken:
            self.problems.add(node.where, "zip", f"{name} is named twice, first at {taken[name].where}")
            return False
        taken[name] = node
        if name == SEED:
            self.problems.add(node.where, "zip", f"seed {REPLICATE}")
        elif name not in self.params.failed and not isinstance(axes.get(name), Grid):
            kind = "sampled" if name in axes else f"fixed at {self.params.fixed[name]!r}"
            self.problems.add(node.where, "zip", f"{name} is {kind}; only grids move together")
        else:
            return name not in self.params.failed
        return False

    def _are_equally_long(self, node: Node, group: tuple[str, ...]) -> bool:
        lengths = {name: len(ends(self.params.axes[name])) for name in group}
        if len(set(lengths.values())) == 1:
            return True
        counts = ", ".join(f"{name} has {length} values" for name, length in lengths.items())
        self.problems.add(node.where, "zip", f"{counts}; axes that move together are equally long")
        return False

    # --- exclude, enqueue -------------------------------------------------------------------------------------------

    def _excluded(self, node: Node | None) -> Iterator[dict[str, tuple[Any, ...]]]:
        for item in self._items(node, "exclude", "exclude: [{k: 1, c_z: 1e-2}]"):
            if condition := self._condition(item, "exclude"):
                yield condition

    def _enqueued(self, node: Node | None) -> Iterator[dict[str, Any]]:
        path = "search.enqueue"
        for item in self._items(node, path, "enqueue: [{lr: 1e-3}]"):
            condition = self._condition(item, path)
            for name, values in condition.items():
                if name == SEED or name in self.params.fixed:
                    why = REPLICATE if name == SEED else f"is fixed at {self.params.fixed[name]!r}"
                    self.problems.add(item.where, f"{path}.{name}", f"{why}; a point names axes")
                elif len(values) > 1:
                    self.problems.add(item.where, f"{path}.{name}", "one value is needed; write a point for each")
            if condition:
                yield {name: values[0] for name, values in condition.items()}

    # --- names and values -------------------------------------------------------------------------------------------

    def _condition(self, node: Node, path: str) -> dict[str, tuple[Any, ...]]:
        """The values of each name; empty after a mistake."""
        if not node.entries:
            self.problems.add(node.where, path, f"{shown(node)} names no axis; write {{precision: bf16}}")
            return {}
        before = len(self.problems)
        read = {
            name: self._values(name, child, f"{path}.{name}")
            for name, child in walk_fields(node.entries, self.fields)
            if self._is_known(name, child, f"{path}.{name}")
        }
        return read if len(self.problems) == before else {}

    def _values(self, name: str, node: Node, path: str) -> tuple[Any, ...]:
        """One value, or those of a list, that this field can have in the sweep."""
        face, raw = self.fields[name], node.plain()
        items = node.items if node.is_list and not accepts(face, raw) else [node]
        if not items:
            self.problems.add(node.where, path, "lists no value")
        return tuple(value for item in items for value in self._value(name, item, path))

    def _value(self, name: str, node: Node, path: str) -> Iterator[Any]:
        try:
            value = self.fields[name].check(node.plain())
        except ValueError as error:
            self.problems.add(node.where, path, f"{shown(node)}: {self._mended(name, node) or error}")
            return
        if self._can_be(name, value):
            yield value
        else:
            self.problems.add(node.where, path, off_axis(value, self.params.axes[name]))

    def _mended(self, name: str, node: Node) -> str | None:
        near = nearest(node.text, map(str, self.fields[name].choices))
        return f"did you mean {near}?" if near else None

    def _can_be(self, name: str, value: Any) -> bool:
        """A fixed field may have other values in the file: somebody narrowed the sweep. So may one from `--set`."""
        params = self.params
        is_narrowed = name in params.fixed or name in params.from_command_line
        is_default = name in self.defaults and same_value(value, self.defaults[name])
        return is_narrowed or is_default or name in params.failed or contains(params.axes[name], value)

    def _is_known(self, name: str, node: Node, path: str) -> bool:
        known = [*self.params.axes, *self.params.fixed, *self.params.failed]
        if name in known:
            return True
        if name in self.fields:
            hint = f"is not in params; name it there (its default is {self.fields[name].default!r})"
        else:
            near = nearest(name, known)
            there = f"did you mean {near}?" if near else f"it has {', '.join(known) or 'no field'}"
            hint = f"is not in params; {there}"
        self.problems.add(node.where, path, hint if path.endswith(f".{name}") else f"{name} {hint}")
        return False

    # --- shapes -----------------------------------------------------------------------------------------------------

    def _entries(self, node: Node | None, path: str, example: str) -> Mapping[str, Node]:
        if node is not None and node.value is not None and not node.is_mapping:
            self.problems.add(node.where, path, f"{shown(node)} is no mapping; write {example}")
        return node.entries if node else {}

    def _items(self, node: Node | None, path: str, example: str) -> list[Node]:
        if node is not None and node.value is not None and not node.is_list:
            self.problems.add(node.where, path, f"{shown(node)} is no list; write {example}")
        return node.items if node else []


def off_axis(value: Any, axis: Domain) -> str:
    """That an axis cannot have this value, and the nearest one it can have."""
    if not isinstance(axis, Grid | Choice):
        return f"{value!r} is not on its axis, which goes from {axis.low} to {last_value(axis)}" + (
            f" in steps of {axis.step}" if axis.step else ""
        )
    values = ends(axis)
    near = _nearest_value(value, values)
    hint = "" if near is None else f"; did you mean {near}?"
    return f"{value!r} is not on its axis, which has {', '.join(map(str, values))}{hint}"


def _nearest_value(value: Any, values: tuple[Any, ...]) -> Any:
    if isinstance(value, str):
        return nearest(value, [str(one) for one in values])
    if not is_number(value):
        return None
    return min(filter(is_number, values), key=lambda one: abs(one - value), default=None)
