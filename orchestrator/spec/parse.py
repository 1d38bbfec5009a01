"""A sweep file's text to a `SweepSpec`, or to all its mistakes at once. Starts nothing and opens no database."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from orchestrator.errors import NotFound, WorkloadBroken
from orchestrator.spec.cross_fields import check_combinations
from orchestrator.spec.devices import device_notes, refuse_cuda_without_gpu
from orchestrator.spec.document import Node, head_comment, parse_document
from orchestrator.spec.domains import Grid
from orchestrator.spec.faces import WorkloadFace, WorkloadOf
from orchestrator.spec.health import read_stop, read_thresholds, threshold_notes
from orchestrator.spec.instability import read_unstable
from orchestrator.spec.overrides import apply_overrides
from orchestrator.spec.params import Params, read_params
from orchestrator.spec.problems import Problems, unknown_key
from orchestrator.spec.sections import (
    Section,
    as_mapping,
    flag,
    fuse,
    read_metric,
    read_resources,
    read_retries,
    read_search,
    read_show,
    read_tags,
    text,
    whole,
)
from orchestrator.spec.sweep_spec import Search, SweepSpec

LATER = ("when", "zip", "exclude", "scheduler", "budget")
"""Keys of the full language that this version refuses. To add one: read it here, then take it off this list."""

NO_EFFECT_YET = {
    "fuse": "every trial trains by itself in this version",
}
"""Keys that are read and checked but change nothing yet; a plan says so."""

KEYS = (
    *("name", "workload", "metric", "params", "seeds", "search", "resources", "retries", "retry_on", "stop", "health"),
    *("show", "unstable"),
    *("log_every", "checkpoint_every", "tags", "fuse", "preflight"),
)
MAX_NAME = 40
MAX_TRIALS = 1_000_000


def parse_sweep(
    text: str, file_name: str, workload_of: WorkloadOf, overrides: Sequence[str] = (), name: str | None = None
) -> SweepSpec:
    """The sweep that `text` describes, with `--set` and `--name` applied.

    `workload_of` finds a workload by name (`orchestrator.workload.describe`). Raises SpecError with every problem;
    what a user's own workload raises while it is imported passes through.
    """
    problems = Problems()
    root = parse_document(text, file_name, problems)
    for key in ("metric", "search"):
        _expand_short_form(root, key)
    apply_overrides(root, overrides, problems)
    _check_keys(root, problems)
    spec = _Parser(root, file_name, problems).spec(workload_of, name)
    problems.raise_if_any()
    return SweepSpec(**{**vars(spec), "source": text, "description": head_comment(text), "overrides": tuple(overrides)})


def legal_name(word: str) -> str:
    """`word` in the alphabet of sweep names: other characters become `_`, capitals small, a leading digit gets `s_`."""
    name = re.sub(r"[^a-z0-9_]", "_", word.lower())
    return name if re.match(r"[a-z]", name) else f"s_{name.lstrip('_')}"


def _expand_short_form(root: Node, key: str) -> None:
    long_form = as_mapping(root.entries.get(key), "name" if key == "metric" else "algorithm")
    if long_form is not None:
        root.entries[key] = long_form


def _check_keys(root: Node, problems: Problems) -> None:
    for key, child in root.entries.items():
        if key in LATER:
            problems.add(child.where, key, "is not supported by this version yet; remove it")
        elif key not in KEYS:
            problems.add(child.where, key, unknown_key(key, KEYS))


class _Parser:
    """Reads section by section; holds only what all sections share."""

    def __init__(self, root: Node, file_name: str, problems: Problems) -> None:
        self.root, self.file_name, self.problems = root, file_name, problems
        self.top = Section("", root.entries, problems)
        self.lines = dict(_places(root, ""))
        self.start = f"{file_name}:1"

    def spec(self, workload_of: WorkloadOf, name: str | None) -> SweepSpec:
        """The spec as far as it could be read; `problems` says whether it may be used."""
        entries, problems, top = self.root.entries, self.problems, self.top
        workload = self._workload(workload_of)
        search = read_search(entries.get("search"), problems)
        params = self._params(workload, search) if workload else Params()
        resources = read_resources(entries.get("resources"), problems)
        stop = read_stop(entries.get("stop"), workload, problems)
        thresholds = read_thresholds(entries.get("health"), workload, problems)
        refuse_cuda_without_gpu(params, resources, self._where, problems)
        effectless = (f"{key}: {why}" for key, why in NO_EFFECT_YET.items() if key in entries)
        health = (*stop.notes, *threshold_notes(thresholds, workload))
        return SweepSpec(
            name=self._name(name),
            workload=top.read("workload", text, ""),
            metric=read_metric(entries.get("metric"), workload, self.start, problems),
            fixed=params.fixed,
            axes=params.axes,
            search=search,
            resources=resources,
            retries=read_retries(top),
            stop_diverged=stop.diverged,
            stop_on=stop.on,
            thresholds=thresholds,
            unstable=read_unstable(entries.get("unstable"), workload, params, problems),
            log_every=top.read("log_every", whole(1), 10),
            show=read_show(entries.get("show"), workload, problems),
            tags=read_tags(entries.get("tags"), problems),
            lines=self.lines,
            fuse=top.read("fuse", fuse, "auto"),  # type: ignore[arg-type]  # `fuse` lets nothing else through
            preflight=top.read("preflight", flag, True),
            checkpoint_every=top.read("checkpoint_every", whole(1), 100),
            file_name=self.file_name,
            notes=(*params.notes, *device_notes(params, resources), *health, *effectless),
        )

    def _name(self, given: str | None) -> str:
        """`--name`, else `name:`, both as they must be; else the file's stem, made legal."""
        stem = Path(self.file_name).stem
        name = given if given is not None else self.top.read("name", text, legal_name(stem))
        if re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name):
            return name
        where = "--name" if given is not None else self.lines.get("name", self.start)
        shown = legal_name(name)[:MAX_NAME]
        rule = "a letter, then letters, digits and _, all small, 40 characters at most"
        self.problems.add(where, "name", f"{name!r} is no sweep name ({rule}); write {shown}")
        return shown

    def _workload(self, workload_of: WorkloadOf) -> WorkloadFace | None:
        name = self.top.read("workload", text, "")
        if not name:
            if "workload" not in self.lines or self.root.entries["workload"].value is None:
                self.problems.add(self.start, "workload", "is missing; `orch workloads` lists those that come along")
            return None
        try:
            return workload_of(name)
        except (NotFound, WorkloadBroken) as error:
            self.problems.add(self.lines["workload"], "workload", str(error))
            return None

    def _params(self, workload: WorkloadFace, search: Search) -> Params:
        entries = self.root.entries
        where = self.lines.get("params", self.lines["workload"])
        params = read_params(entries.get("params"), entries.get("seeds"), workload, where, self.problems)
        if params.sound:
            check_combinations(params.fixed, params.axes, workload.resolve, self._where, self.problems)
            self._check_search(search, params)
        return params

    def _check_search(self, search: Search, params: Params) -> None:
        """Whether the axes and the search fit together, and how many trials that makes."""
        sampled = [name for name, axis in params.axes.items() if not isinstance(axis, Grid)]
        where = self._where("search")
        if search.algorithm == "grid":
            for name in sampled:
                hint = "write search: {algorithm: random, samples: 20} (or optuna), or a grid"
                self.problems.add(
                    self._where(f"params.{name}"), f"params.{name}", f"is sampled, but nothing samples; {hint}"
                )
            if search.samples is not None:
                self.problems.add(where, "search.samples", "belongs to algorithm: random or optuna")
            self._check_size(params, 1)
        elif not sampled:
            self.problems.add(
                where, "search", f"{search.algorithm} has nothing to sample: no choice or range in params"
            )
        elif search.samples is None:
            self.problems.add(where, "search.samples", f"{search.algorithm} needs a number, such as samples: 20")
        else:
            self._check_size(params, search.samples)

    def _check_size(self, params: Params, samples: int) -> None:
        grids = (axis.values for axis in params.axes.values() if isinstance(axis, Grid))
        count = samples * math.prod(len(values) for values in grids)
        if count > MAX_TRIALS:
            self.problems.add(
                self._where("params"), "params", f"make {count:,} trials; at most {MAX_TRIALS:,} are possible"
            )

    def _where(self, path: str) -> str:
        while path not in self.lines and "." in path:
            path = path.rpartition(".")[0]
        return self.lines.get(path, self.start)


def _places(node: Node, prefix: str) -> Iterator[tuple[str, str]]:
    """(dotted path, `file:line`) of every key."""
    for key, child in node.entries.items():
        yield prefix + key, child.where
        yield from _places(child, f"{prefix}{key}.")
