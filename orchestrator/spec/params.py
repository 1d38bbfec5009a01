"""The `params` of a sweep file: nested or dotted names to fixed values and axes. Judges each field alone."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.spec.document import Node
from orchestrator.spec.domain_parsing import AxisReader, mistyped_domain
from orchestrator.spec.domains import Choice, Domain, Grid, Int, Uniform
from orchestrator.spec.faces import FieldFace, WorkloadFace
from orchestrator.spec.overrides import WHERE as COMMAND_LINE
from orchestrator.spec.overrides import is_domain, is_overridden
from orchestrator.spec.problems import Problems, nearest
from orchestrator.spec.sections import whole
from orchestrator.spec.sweep_spec import SEED

MAX_NAME_BYTES = 63  # a column name in PostgreSQL; longer ones are cut there
MAX_SEEDS = 1_000_000  # as many as a sweep may have trials
SEEDS = "seeds"  # the short form of `seed: {grid: [0, 1, ...]}`


@dataclass
class Params:
    """What `params` says."""

    fixed: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, Domain] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    from_command_line: set[str] = field(default_factory=set)  # the fields that --set gave
    failed: set[str] = field(default_factory=set)  # the fields whose value cannot be used

    @property
    def sound(self) -> bool:
        return not self.failed


def read_params(
    node: Node | None,
    seeds: Node | None,
    workload: WorkloadFace,
    where: str,
    problems: Problems,
    zipped: Collection[str] = (),
) -> Params:
    """Reads `params` and the top-level `seeds`; every mistake becomes a problem at its line.

    The grids of `zipped` axes keep a value that comes twice: it stands beside another one of its partner.
    """
    params = Params()
    fields = workload.fields()
    _check_names(fields, workload, where, problems)
    if node is not None and node.value is not None and not node.is_mapping:
        problems.add(node.where, "params", "is no mapping; write one field a line, such as lr: 1e-3")
    flat = _flatten(node, fields, problems)
    if SEEDS not in fields:
        seeds = flat.pop(SEEDS, None) or seeds
    for name, child in flat.items():
        if name in fields:
            reader = AxisReader(f"params.{name}", fields[name], problems, params.notes, repeats=name in zipped)
            _read_field(name, child, reader, params)
        else:
            _refuse_unknown(name, child, fields, workload, problems)
    params.from_command_line |= {name for name, child in flat.items() if is_overridden(child)}
    _read_seeds(seeds, flat.get(SEED), fields, workload, params, problems)
    _check_required(fields, {*params.fixed, *params.axes, *flat}, where, params, problems)
    return params


def _check_names(fields: Mapping[str, FieldFace], workload: WorkloadFace, where: str, problems: Problems) -> None:
    for name in fields:
        if len(name.encode()) > MAX_NAME_BYTES:
            problems.add(where, "workload", f"{workload.name}: field name {name} is over {MAX_NAME_BYTES} bytes long")
        elif not re.fullmatch(r"[\w.\-]+", name):
            problems.add(
                where, "workload", f"{workload.name}: field name {name!r} cannot be stored (letters, digits, _ - .)"
            )


def _flatten(node: Node | None, fields: Mapping[str, FieldFace], problems: Problems) -> dict[str, Node]:
    """Nodes by dotted field name. A name in two spellings is a problem, unless one came from the command line."""
    flat: dict[str, Node] = {}
    for name, child in walk_fields(node.entries if node else {}, fields):
        if name not in flat or flat[name].where != COMMAND_LINE == child.where:
            flat[name] = child
        elif child.where != COMMAND_LINE != flat[name].where:
            lines = f"{flat[name].where} and {child.where}"
            problems.add(child.where, f"params.{name}", f"key {name} is given twice: {lines}")
    return flat


def walk_fields(
    entries: Mapping[str, Node], fields: Mapping[str, FieldFace], prefix: str = ""
) -> Iterator[tuple[str, Node]]:
    """(dotted field name, node) of a mapping that may be nested as the fields are."""
    for key, child in entries.items():
        name = prefix + key
        if child.is_mapping and name not in fields and any(known.startswith(f"{name}.") for known in fields):
            yield from walk_fields(child.entries, fields, f"{name}.")
        else:
            yield name, child


def _read_field(name: str, node: Node, reader: AxisReader, params: Params) -> None:
    value = reader.read(node)
    if reader.failed:
        params.failed.add(name)
    elif isinstance(value, Grid | Choice | Uniform | Int):
        params.axes[name] = value
    else:
        params.fixed[name] = value


def _refuse_unknown(
    name: str, node: Node, fields: Mapping[str, FieldFace], workload: WorkloadFace, problems: Problems
) -> None:
    path = f"params.{name}"
    below = [known for known in fields if known.startswith(f"{name}.")]
    if below:
        problems.add(node.where, path, f"holds the fields {', '.join(below)}; give a mapping of them")
    elif near := nearest(name, fields):
        hint = f"did you mean {near}? ({workload.name} does not use {name})"
        problems.add(node.where, path, f"unknown key {path}, {hint}")
    else:
        problems.add(node.where, path, f"{workload.name} does not use {name}; see `orch workloads {workload.name}`")
    if node.is_mapping and not is_domain(node):
        problems.add(node.where, path, mistyped_domain(node))


def _read_seeds(
    seeds: Node | None,
    seed: Node | None,
    fields: Mapping[str, FieldFace],
    workload: WorkloadFace,
    params: Params,
    problems: Problems,
) -> None:
    """Turns `seeds: 3` into the axis `seed` of 0, 1, 2; refuses a sampled seed."""
    axis = params.axes.get(SEED)
    if axis is not None and not isinstance(axis, Grid) and seed is not None:
        problems.add(
            seed.where, "params.seed", "is a replicate and cannot be sampled; write seeds: 3 or {grid: [0, 1, 2]}"
        )
    if seeds is None or seeds.value is None:
        return
    try:
        values = tuple(range(whole(1, MAX_SEEDS)(seeds)))
    except ValueError as error:
        problems.add(seeds.where, SEEDS, f"{error} (seeds: 3 means seed: {{grid: [0, 1, 2]}})")
        return
    if SEED not in fields:
        problems.add(seeds.where, SEEDS, f"{workload.name} does not use seed")
    elif seed is None or seeds.where == COMMAND_LINE != seed.where:
        params.fixed.pop(SEED, None)
        params.axes[SEED] = Grid(values)
        if seeds.where == COMMAND_LINE:
            params.from_command_line.add(SEED)
    elif seed.where != COMMAND_LINE or seeds.where == COMMAND_LINE:
        problems.add(seeds.where, SEEDS, f"params.seed is given as well ({seed.where}); keep one of them")


def _check_required(
    fields: Mapping[str, FieldFace], named: set[str], where: str, params: Params, problems: Problems
) -> None:
    missing = [name for name, face in fields.items() if face.required and name not in named]
    for name in missing:
        params.failed.add(name)
        problems.add(where, f"params.{name}", f"is required ({fields[name].type_name}) and has no default")
