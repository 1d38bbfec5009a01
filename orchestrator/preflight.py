"""Checks a sweep before it trains: which of its trials stand for all, and what their findings mean for it.

A *structure* is what the trials agree in that differ only in scalars (c_z, lr), in sizes and durations or in the seed.
A bug in the code shows in all of them or in none, so the first one is checked.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.checking import SLOW_S, Answer, run_checks
from orchestrator.errors import Problem, SpecError
from orchestrator.reports.health import telling, values_in_words
from orchestrator.reports.table import Table, counted, short
from orchestrator.search import make_searcher
from orchestrator.search.searcher import cells_of, make_candidate, replicates_of
from orchestrator.spec import SweepSpec
from orchestrator.spec.domains import Choice, Domain, sample, value_key
from orchestrator.spec.relations import excluded
from orchestrator.spec.sweep_spec import SEED
from orchestrator.trial import Candidate, Finding, Params, Severity
from orchestrator.workload import Description, describe

BUDGET_S = 60.0  # as long as a person waits before a sweep; what is shipped takes some 20 s on two cores
NOT_CHECKED = "not_checked"
MANY = 8  # structures named in one message


@dataclass(frozen=True)
class Structure:
    """The swept values that set it apart from the sweep's others, and the parameters of its first trial."""

    varied: Params
    params: Params

    def __str__(self) -> str:
        return ", ".join(f"{axis}={short(value)}" for axis, value in self.varied.items())


@dataclass(frozen=True)
class Preflight:
    """What the checks said; no answer: that structure was not begun in time."""

    spec: SweepSpec
    answers: Sequence[tuple[Structure, Answer | None]]
    undrawn: Sequence[str]  # see `undrawn_axes`
    seconds: float
    budget_s: float

    @property
    def has_error(self) -> bool:
        return any(finding.severity is Severity.ERROR for _, finding in self._found())

    @property
    def is_whole(self) -> bool:
        """True if every structure was begun, and its checks came to their end."""
        return all(answer and not answer.failed for _, answer in self.answers)

    def findings(self) -> list[Finding]:
        """For the ledger: each check's first finding a severity, with the structures it is about; what was not checked.

        Worst first.
        """
        return [*(finding for finding, _ in self._by_check()), *self._not_checked()]

    def remarks(self) -> list[str]:
        """How it went, in a line, then one for each check that found something to think about, which is no error."""
        counts = [
            counted(count, severity)
            for severity in reversed(Severity)
            if (count := sum(finding.severity is severity for _, finding in self._found()))
        ]
        said = ", ".join(counts) or "nothing found"
        head = f"preflight: {self._coverage()} in {self.seconds:.1f} s: {said}"
        milder = [one for one, _ in self._by_check() if one.severity is not Severity.ERROR]
        return [head, *(f"{one.severity}  {_in_words(one)}" for one in (*milder, *self._not_checked()))]

    def refusal(self) -> SpecError:
        """Why the sweep does not start, one block for each check that found an error, and how to go on."""
        problems = [
            Problem(self.spec.where(place), "preflight", _in_words(finding))
            for finding, place in self._by_check()
            if finding.severity is Severity.ERROR
        ]
        way = "nothing was started; where the bug is the question, write preflight: false (or --set preflight=false)"
        return SpecError([*problems, Problem("", "", way)])

    def table(self) -> Table:
        """One row a finding, one for each structure without any."""
        axes = list(dict.fromkeys(axis for structure, _ in self.answers for axis in structure.varied))
        rows = [
            [*(structure.varied[axis] for axis in axes), *cells]
            for structure, answer in self.answers
            for cells in (_rows_of(answer) if answer else [[NOT_CHECKED, Severity.INFO.value, None, None, None]])
        ]
        columns = [*axes, "check", "severity", "message", "advice", "seconds"]
        notes = [finding.message for finding in self._not_checked()]
        title = f"{self.spec.workload}: {self._coverage()} in {self.seconds:.1f} s"
        if not self.answers:
            title = f"{self.spec.workload} has no checks to run before training"
        return Table(columns, rows, title=title, notes=notes)

    def _found(self) -> list[tuple[Structure, Finding]]:
        return [(structure, finding) for structure, answer in self.answers if answer for finding in answer.findings]

    def _coverage(self) -> str:
        num_checked = sum(answer is not None and not answer.failed for _, answer in self.answers)
        return f"{num_checked} of {len(self.answers)} structures checked"

    def _not_checked(self) -> Iterator[Finding]:
        late = [structure for structure, answer in self.answers if answer is None]
        failed = [structure for structure, answer in self.answers if answer and answer.failed]
        if late or failed:
            parts = [self._coverage()]
            parts += [f"not begun in {self.budget_s:.0f} s: {_listed(late)}"] if late else []
            parts += [f"the checks failed themselves of {_listed(failed)}"] if failed else []
            severity = Severity.WARNING if failed else Severity.INFO
            advice = f"orch check {self.spec.file_name} checks all of them"
            yield Finding(NOT_CHECKED, severity, "; ".join(parts), advice, value=len(late) + len(failed))
        if self.undrawn:
            message = f"{', '.join(self.undrawn)}: drawn while the sweep runs; one value of each was checked"
            yield Finding(NOT_CHECKED, Severity.INFO, message)

    def _by_check(self) -> Iterator[tuple[Finding, str]]:
        """Worst first, each check once a severity: its first finding, which says where, and its path in the file."""
        groups: dict[tuple[Severity, str], list[tuple[Structure, Finding]]] = {}
        for structure, finding in self._found():
            groups.setdefault((finding.severity, finding.check_name), []).append((structure, finding))
        for members in sorted(groups.values(), key=lambda group: -group[0][1].severity.rank):
            finding = members[0][1]
            where, place = self._where([structure for structure, _ in members])
            yield replace(finding, message=where + finding.message), place

    def _where(self, structures: Sequence[Structure]) -> tuple[str, str]:
        """`in 3 of 8 structures (all with bug=no_zero_grad): `, and the path of what tells them from the others."""
        affected = {value_key(one.varied): one.varied for one in structures}
        if len(affected) == len(self.answers):
            return f"in all {counted(len(self.answers), 'structure')}: " if structures[0].varied else "", "workload"
        others = [one.varied for one, answer in self.answers if answer and value_key(one.varied) not in affected]
        values = telling(list(affected.values()), others, structures[0].varied)
        which = f"all with {values_in_words(values)}" if values else _listed(structures)
        place = f"params.{next(iter(values))}" if values else "workload"
        return f"in {len(affected)} of {len(self.answers)} structures ({which}): ", place


def has_checks(workload: Description) -> bool:
    """True if it has a `check`. A shipped one is not imported for that: it declares `check_failed` with its checks."""
    if ":" in workload.address:
        return hasattr(workload.load(), "check")
    return "check_failed" in workload.checks


def structures_of(
    spec: SweepSpec,
    workload: Description,
    known: Sequence[Params] = (),
    candidates: Iterable[Candidate] | None = None,
) -> list[Structure]:
    """The sweep's structures as far as they are known before it starts, in the order of their first trials.

    Without those of `known` parameters, which name every axis of the sweep. `candidates`: what is foreseen, if at hand.
    """
    axes = _structural_axes(spec, workload)

    def key(params: Params) -> str:
        return value_key([params.get(axis) for axis in axes]) if axes else ""

    first: dict[str, Params] = {}
    for candidate in foreseen(spec) if candidates is None else candidates:
        first.setdefault(key(candidate.params), candidate.params)
    differing = [axis for axis in axes if len({value_key(params.get(axis)) for params in first.values()}) > 1]
    seen = {key(params) for params in known}
    return [
        Structure({axis: params.get(axis) for axis in differing}, params)
        for place, params in first.items()
        if place not in seen
    ]


def undrawn_axes(spec: SweepSpec, workload: Description) -> list[str]:
    """Structural axes whose values nobody knows before the sweep has drawn them."""
    drawn_late = spec.sampled_axes if spec.search.algorithm == "optuna" else {}
    return [axis for axis in _structural_axes(spec, workload) if axis in drawn_late and not _is_list(drawn_late[axis])]


def preflight(
    spec: SweepSpec, said: Callable[[str], None], budget_s: float = BUDGET_S, known: Sequence[Params] = ()
) -> Preflight:
    """Checks the first trial of each structure; those not begun within the budget are left out.

    `said` is told what will take its time; stderr, what takes longer than it should. A workload without checks has no
    structure to be checked. Structures of `known` parameters were checked before.
    """
    started, workload = time.monotonic(), describe(spec.workload)
    if not has_checks(workload):
        return Preflight(spec, [], [], 0.0, budget_s)
    structures = structures_of(spec, workload, known)
    if not structures:
        return Preflight(spec, [], [], 0.0, budget_s)
    said(f"preflight: checking {counted(len(structures), 'structure')} of {spec.workload} ...")

    def slow(index: int, where: str) -> None:
        which = str(structures[index]) or spec.workload
        print(f"preflight: {which} takes longer than {SLOW_S:.0f} s: in {where}", file=sys.stderr, flush=True)

    configs = [one.params for one in structures]
    answers = run_checks(workload.address, configs, spec.thresholds, budget_s, slow=slow)
    undrawn = undrawn_axes(spec, workload)
    return Preflight(spec, list(zip(structures, answers, strict=True)), undrawn, time.monotonic() - started, budget_s)


def preflight_notes(spec: SweepSpec, workload: Description, structures: Sequence[Structure]) -> list[str]:
    """What a plan says of it."""
    if not has_checks(workload):
        return []
    if not spec.preflight:
        return [f"preflight: false, so nothing of {spec.workload} is checked before it trains"]
    axes = f" ({', '.join(structures[0].varied)})" if structures[0].varied else ""
    what = f"{counted(len(structures), 'structure')} of {spec.workload}{axes}"
    return [f"preflight: {what} checked before anything starts"]


def _structural_axes(spec: SweepSpec, workload: Description) -> list[str]:
    fields = workload.fields()
    return [axis for axis in spec.axes if axis != SEED and not (fields[axis].fusible or fields[axis].size)]


def foreseen(spec: SweepSpec) -> Iterator[Candidate]:
    """Every trial of a grid or of random draws. Of an Optuna search each cell with each listed choice, the first seed,
    and some value of each range, unless that is excluded.
    """
    if spec.search.algorithm != "optuna":
        yield from make_searcher(spec).ask([]) or ()
        return
    options = [_some_values(axis) for axis in spec.sampled_axes.values()]
    for cell, values in itertools.product(cells_of(spec), itertools.product(*options)):
        point = dict(zip(spec.sampled_axes, values, strict=True))
        candidate = make_candidate(spec, cell, point, replicates_of(spec)[0])
        if not excluded(spec, candidate.params):
            yield candidate


def _some_values(domain: Any) -> tuple[Any, ...]:
    options = domain.options if isinstance(domain, Choice) else (domain,)
    return tuple(sample(option, random.Random(0)) for option in options)


def _is_list(domain: Any) -> bool:
    """True for a choice without a range among its options."""
    return isinstance(domain, Choice) and not any(isinstance(option, Domain) for option in domain.options)


def _rows_of(answer: Answer) -> Iterator[list[Any]]:
    """Check, severity, message, advice, seconds."""
    for one in answer.findings:
        yield [one.check_name, one.severity.value, one.message, one.advice, answer.seconds]
    if not answer.findings:
        yield ["ok", None, None, None, answer.seconds]


def _in_words(finding: Finding) -> str:
    return f"{finding.check_name}: {finding.message}  {finding.advice}".rstrip()


def _listed(structures: Sequence[Structure]) -> str:
    """The first few; where there is but one, it has no name."""
    more = f" and {len(structures) - MANY} more" if len(structures) > MANY else ""
    return "; ".join(str(one) or "the only one" for one in structures[:MANY]) + more
