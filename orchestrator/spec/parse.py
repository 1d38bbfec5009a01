"""A sweep file's text to a `SweepSpec`, or to all its mistakes at once. Starts nothing and opens no database."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.errors import NotFound, WorkloadBroken
from orchestrator.spec.cross_fields import check_combinations
from orchestrator.spec.devices import device_notes, refuse_cuda_without_gpu
from orchestrator.spec.document import Node, head_comment, parse_document
from orchestrator.spec.domains import Grid
from orchestrator.spec.faces import FieldFace, WorkloadFace, WorkloadOf
from orchestrator.spec.health import read_stop, read_thresholds, threshold_notes
from orchestrator.spec.instability import read_unstable
from orchestrator.spec.overrides import apply_override
from orchestrator.spec.params import Params, read_params
from orchestrator.spec.points import factors_of, num_combinations, num_grid_points
from orchestrator.spec.problems import Problems, unknown_key
from orchestrator.spec.relation_checks import check_relations
from orchestrator.spec.relation_parsing import RelationReader, Relations
from orchestrator.spec.scheduling import check_schedule, read_schedule
from orchestrator.spec.sections import (
    Section,
    as_mapping,
    flag,
    fuse,
    read_budget,
    read_metrics,
    read_resources,
    read_retries,
    read_search,
    read_show,
    read_tags,
    text,
    whole,
)
from orchestrator.spec.sweep_spec import SweepSpec

NO_EFFECT_YET = {
    "fuse": "every trial trains by itself in this version",
}
"""Keys that are read and checked but change nothing yet; a plan says so."""

KEYS = (
    *("name", "workload", "metric", "params", "seeds", "search", "resources", "retries", "retry_on", "stop", "health"),
    *("show", "unstable", "when", "zip", "exclude", "scheduler", "budget"),
    *("log_every", "checkpoint_every", "keep_checkpoints", "tags", "fuse", "preflight"),
)
SHORT_FORMS = {"metric": "name", "search": "algorithm", "scheduler": "algorithm"}
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
    root = _document(text, file_name, overrides, problems)
    _check_keys(root, problems)
    spec = _Parser(root, file_name, problems).spec(workload_of, name)
    problems.raise_if_any()
    return replace(spec, source=text, description=head_comment(text), overrides=tuple(overrides))


def cpu_asked(text: str, file_name: str, overrides: Sequence[str] = ()) -> float:
    """`resources.cpu`, without importing the workload. Mistakes are `parse_sweep`'s to tell.

    Raises SpecError when nothing can be read.
    """
    problems = Problems()
    root = _document(text, file_name, overrides, problems)
    return read_resources(root.entries.get("resources"), problems).cpu


def _document(text: str, file_name: str, overrides: Sequence[str], problems: Problems) -> Node:
    root = parse_document(text, file_name, problems)
    _expand_short_forms(root)
    for override in overrides:  # a later one wins
        apply_override(root, override, problems)
        _expand_short_forms(root)
    return root


def legal_name(word: str) -> str:
    """`word` in the alphabet of sweep names: other characters become `_`, capitals small, a leading digit gets `s_`."""
    name = re.sub(r"[^a-z0-9_]", "_", word.lower())
    return name if re.match(r"[a-z]", name) else f"s_{name.lstrip('_')}"


def _expand_short_forms(root: Node) -> None:
    for section, key in SHORT_FORMS.items():
        long_form = as_mapping(root.entries.get(section), key)
        if long_form is not None:
            root.entries[section] = long_form


def _check_keys(root: Node, problems: Problems) -> None:
    for key, child in root.entries.items():
        if key not in KEYS:
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
        workload = self._workload(workload_of)
        fields = workload.fields() if workload else {}
        params = self._params(workload, fields) if workload else Params()
        relations = self._relations(fields, params)
        spec = self._judged(self._asked(name, workload, params, relations), workload, params)
        notes = [*spec.notes, *device_notes(params, spec.resources)]
        if workload and params.sound and relations.sound:
            notes += self._checked(spec, workload, fields)
        notes += [f"{key}: {why}" for key, why in NO_EFFECT_YET.items() if key in self.root.entries]
        refuse_cuda_without_gpu(params, spec.resources, self._where, self.problems)
        return replace(spec, notes=tuple(notes))

    def _asked(self, name: str | None, workload: WorkloadFace | None, params: Params, tied: Relations) -> SweepSpec:
        """What is trained, how values are chosen, and how trials run."""
        entries, problems, top = self.root.entries, self.problems, self.top
        metrics = read_metrics(entries.get("metric"), workload, self.start, problems)
        return SweepSpec(
            name=self._name(name),
            workload=top.read("workload", text, ""),
            metric=metrics[0],
            more_metrics=tuple(metrics[1:]),
            fixed=params.fixed,
            axes=params.axes,
            when=tied.when,
            zipped=tied.zipped,
            exclude=tied.exclude,
            search=replace(read_search(entries.get("search"), problems), enqueue=tied.enqueue),
            schedule=read_schedule(entries.get("scheduler"), problems),
            budget=read_budget(entries.get("budget"), problems),
            resources=read_resources(entries.get("resources"), problems),
            retries=read_retries(top),
            log_every=top.read("log_every", whole(1), 10),
            checkpoint_every=top.read("checkpoint_every", whole(1), 100),
            keep_checkpoints=top.read("keep_checkpoints", flag, False),
            fuse=top.read("fuse", fuse, "auto"),  # type: ignore[arg-type]  # `fuse` lets nothing else through
            preflight=top.read("preflight", flag, True),
            tags=read_tags(entries.get("tags"), problems),
            lines=self.lines,
            file_name=self.file_name,
            notes=tuple(params.notes),
        )

    def _judged(self, spec: SweepSpec, workload: WorkloadFace | None, params: Params) -> SweepSpec:
        """The spec with what its trials and results are held against, and notes on that."""
        entries, problems = self.root.entries, self.problems
        stop = read_stop(entries.get("stop"), workload, problems)
        thresholds = read_thresholds(entries.get("health"), workload, problems)
        return replace(
            spec,
            stop_diverged=stop.diverged,
            stop_on=stop.on,
            same_error=stop.same_error,
            thresholds=thresholds,
            unstable=read_unstable(entries.get("unstable"), workload, params, problems, spec.zipped),
            show=read_show(entries.get("show"), workload, problems),
            notes=(*spec.notes, *stop.notes, *threshold_notes(thresholds, workload)),
        )

    def _checked(self, spec: SweepSpec, workload: WorkloadFace, fields: Mapping[str, FieldFace]) -> tuple[str, ...]:
        """Holds the parts of the spec against each other; returns what a reader of the plan should know."""
        if not self._fits_search(spec):
            return ()
        check_combinations(spec, workload.resolve, self._where, self.problems)
        return (*check_relations(spec, self.problems), *check_schedule(spec, fields, self._where, self.problems))

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
                hint = "`orch workloads` lists those that come along"
                self.problems.add(self._where("workload"), "workload", f"is missing; {hint}")
            return None
        try:
            return workload_of(name)
        except (NotFound, WorkloadBroken) as error:
            self.problems.add(self.lines["workload"], "workload", str(error))
            return None

    def _params(self, workload: WorkloadFace, fields: Mapping[str, FieldFace]) -> Params:
        entries = self.root.entries
        where = self.lines.get("params", self.lines["workload"])
        groups = entries["zip"].items if "zip" in entries else []
        zipped = {axis.text for group in groups for axis in group.items}
        return read_params(entries.get("params"), entries.get("seeds"), workload, where, self.problems, zipped)

    def _relations(self, fields: Mapping[str, FieldFace], params: Params) -> Relations:
        if not fields:
            return Relations()
        search = self.root.entries.get("search")
        enqueue = search.entries.get("enqueue") if search else None
        return RelationReader(fields, params, self.problems).read(self.root.entries, enqueue)

    def _fits_search(self, spec: SweepSpec) -> bool:
        """Whether the axes, the search and the budget fit together, and the number of trials is one to be had."""
        search, problems, where = spec.search, self.problems, self._where("search")
        before = len(problems)
        if search.algorithm == "grid":
            self._refuse_samples(spec)
        elif not spec.sampled_axes:
            problems.add(where, "search", f"{search.algorithm} has nothing to sample: no choice or range in params")
        elif search.samples is None:
            problems.add(where, "search.samples", f"{search.algorithm} needs a number, such as samples: 20")
        if search.sampler == "cmaes" and spec.more_metrics:
            problems.add(where, "search.sampler", f"cmaes knows one metric, not {len(spec.objectives)}; write nsga2")
        self._check_size(spec)
        return len(problems) == before

    def _refuse_samples(self, spec: SweepSpec) -> None:
        """What a grid has no use for."""
        for name in spec.sampled_axes:
            path = f"params.{name}"
            hint = "write search: {algorithm: random, samples: 20} (or optuna), or a grid"
            self.problems.add(self._where(path), path, f"is sampled, but nothing samples; {hint}")
        for key, given in (("samples", spec.search.samples), ("enqueue", spec.search.enqueue)):
            if given:
                path = f"search.{key}"
                self.problems.add(self._where(path), path, "belongs to algorithm: random or optuna")

    def _check_size(self, spec: SweepSpec) -> None:
        samples, budget = spec.search.samples or 1, spec.budget.trials
        grids = [name for name, axis in spec.axes.items() if isinstance(axis, Grid)]
        count = samples * num_combinations(factors_of(spec, grids))
        if count > MAX_TRIALS:
            message = f"make {count:,} trials; at most {MAX_TRIALS:,} are possible"
            self.problems.add(self._where("params"), "params", message)
        elif budget is not None and spec.search.algorithm == "grid" and budget < (num := num_grid_points(spec)):
            message = f"{budget} is less than the {num} trials of the grid, which is trained whole or not at all"
            self.problems.add(self._where("budget.trials"), "budget.trials", message)

    def _where(self, path: str) -> str:
        while path not in self.lines and "." in path:
            path = path.rpartition(".")[0]
        return self.lines.get(path, self.start)


def _places(node: Node, prefix: str) -> Iterator[tuple[str, str]]:
    """(dotted path, `file:line`) of every key."""
    for key, child in node.entries.items():
        yield prefix + key, child.where
        yield from _places(child, f"{prefix}{key}.")
