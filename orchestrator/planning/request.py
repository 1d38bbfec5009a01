"""What the person typed, read as a spec. Opens no database and starts nothing."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import Problem, SpecError
from orchestrator.search.plan import listed_candidates, search_problems
from orchestrator.spec import SweepSpec, parse_sweep, read_sweep_file
from orchestrator.spec.cross_fields import resolved
from orchestrator.workload import describe


@dataclass(frozen=True)
class SweepRequest:
    """What the person typed: a sweep file to run, or the name of a sweep to go on with."""

    spec: Path = Path()
    resume: bool = False
    overrides: Sequence[str] = ()
    name: str | None = None
    max_concurrent: int | None = None
    address: str | None = None
    inline: bool = False
    home: Path | None = None
    stored: str = ""  # the sweep that goes on as it was stored; empty: `spec` says what runs

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
        """The command line that would do the same; for a stored sweep, that would do what is left of it."""
        if self.stored:
            parts = [*self.orch, "resume", self.stored]
        else:
            parts = [*self.orch, "sweep", _shell(str(self.spec)), *(f"--set {_shell(one)}" for one in self.overrides)]
        parts += [f"--name {self.name}"] if self.name else []
        parts += [f"--address {self.address}"] if self.address else []
        parts += [f"--max-concurrent {self.max_concurrent}"] if self.max_concurrent else []
        parts += ["--inline"] if self.inline else []
        parts += ["--resume"] if resume and not self.stored else []
        return " ".join(parts)


def read_spec(path: Path, overrides: Sequence[str], name: str | None) -> SweepSpec:
    """The sweep file as a spec. Raises SpecError with every mistake in it, with what stands against its search,
    or with a trial that the workload refuses.
    """
    spec = parse_sweep(read_sweep_file(path), str(path), describe, overrides, name)
    if problems := search_problems(spec):
        raise SpecError([Problem(spec.where(place), place, text) for place, text in problems])
    for candidate in listed_candidates(spec) or ():  # what parsing tried stands for them, but it is not all of them
        resolved(spec, describe(spec.workload).resolve, candidate.params)
    return spec


def read_spec_or_workload(what: str, overrides: Sequence[str]) -> SweepSpec:
    """The sweep file of that name; or else a sweep of one trial, the defaults of the workload of that name."""
    path = Path(what)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return read_spec(path, overrides, None)
    metric = [*describe(what).metrics, "loss"][0]
    return parse_sweep(f"workload: {what}\nmetric: {metric}\n", what, describe, overrides, name="check")


def _shell(text: str) -> str:
    return shlex.quote(text)
