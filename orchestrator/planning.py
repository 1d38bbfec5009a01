"""What the person typed, read as a spec; and what it would run. Opens no database and starts nothing."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.preflight import preflight_notes
from orchestrator.reports.source import unstable_in_words
from orchestrator.reports.table import Table, short
from orchestrator.search import plan_count, plan_notes
from orchestrator.settings import Settings
from orchestrator.spec import SweepSpec, parse_sweep, read_sweep_file, to_json
from orchestrator.spec.domains import Domain, Grid
from orchestrator.tracking.artifacts import local_folder
from orchestrator.workload import describe


@dataclass(frozen=True)
class SweepRequest:
    """What the person typed."""

    spec: Path
    resume: bool = False
    overrides: Sequence[str] = ()
    name: str | None = None
    max_concurrent: int | None = None
    address: str | None = None
    inline: bool = False
    home: Path | None = None

    @property
    def all_overrides(self) -> Sequence[str]:
        if self.max_concurrent is None:
            return self.overrides
        return [*self.overrides, f"resources.max_concurrent={self.max_concurrent}"]

    @property
    def orch(self) -> list[str]:
        """How to call `orch` so that it finds the same home."""
        return ["orch"] if self.home is None else ["orch", "--home", _shell(str(self.home))]

    def command(self, *, resume: bool) -> str:
        """The command line that would do the same."""
        parts = [*self.orch, "sweep", _shell(str(self.spec)), *(f"--set {_shell(one)}" for one in self.overrides)]
        parts += [f"--name {self.name}"] if self.name else []
        parts += [f"--address {self.address}"] if self.address else []
        parts += [f"--max-concurrent {self.max_concurrent}"] if self.max_concurrent else []
        parts += ["--inline"] if self.inline else []
        parts += ["--resume"] if resume else []
        return " ".join(parts)


def read_spec(path: Path, overrides: Sequence[str], name: str | None) -> SweepSpec:
    """The sweep file as a spec. Raises SpecError with every mistake in it."""
    return parse_sweep(read_sweep_file(path), str(path), describe, overrides, name)


def read_spec_or_workload(what: str, overrides: Sequence[str]) -> SweepSpec:
    """The sweep file of that name; or else a sweep of one trial, the defaults of the workload of that name."""
    path = Path(what)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return read_spec(path, overrides, None)
    metric = [*describe(what).metrics, "loss"][0]
    return parse_sweep(f"workload: {what}\nmetric: {metric}\n", what, describe, overrides, name="check")


def plan_sweep(path: Path, overrides: Sequence[str], name: str | None) -> Table:
    """What would run. Opens no database and starts nothing."""
    spec = read_spec(path, overrides, name)
    rows = [[axis, *_described(domain)] for axis, domain in spec.axes.items()]
    rows += [[field, "fixed", short(value)] for field, value in spec.fixed.items()]
    total = plan_count(spec)
    wanted = spec.resources.max_concurrent
    notes = [
        f"{total} trials of {spec.workload}, {spec.search.algorithm} search, {spec.metric.mode} {spec.metric.name}",
        f"each {spec.resources.cpu:g} CPU, {spec.resources.gpu:g} GPU; {wanted or 'as many as fit'} at once",
        *plan_notes(spec),
    ]
    notes += [unstable_in_words(to_json(spec)["unstable"])] if spec.unstable else []
    notes += preflight_notes(spec)
    root = Settings().artifact_root
    if root and local_folder(root) is None:
        notes.append(f"no checkpoints in {root}: an interrupted trial starts again at step 0")
    return Table(["parameter", "kind", "values"], rows, title=spec.description or spec.name, notes=notes)


def _described(domain: Domain) -> tuple[str, str]:
    if isinstance(domain, Grid):
        return "grid", ", ".join(short(value) for value in domain.values)
    return "sampled", str(domain)


def _shell(text: str) -> str:
    return shlex.quote(text)
