"""Whether a changed file still holds every trial of its sweep, and where each of them stands in it. Trains nothing.

A trial is what its resolved config says, however the file spells it: a field that was left to its default, or fixed,
may become an axis. What only adds trials goes on with the sweep; what would leave one out is another sweep.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from orchestrator.reports.table import short
from orchestrator.search import make_searcher, plan_count
from orchestrator.search.listed import ListedSearcher
from orchestrator.search.searcher import cells_of, make_candidate, replicates_of, samples_of, trial_key
from orchestrator.spec import SweepSpec, spec_difference, to_json
from orchestrator.spec.cross_fields import resolved
from orchestrator.spec.domains import contains, distinct, same_value, value_key
from orchestrator.spec.relations import excluded, is_active, settled
from orchestrator.spec.sweep_spec import SEED
from orchestrator.trial import Candidate, Params, config_hash
from orchestrator.workload import Description, flatten

if TYPE_CHECKING:  # needs the database's driver
    from orchestrator.ledger.rows import SweepRow, TrialRow

SPACE = ("params", "when", "zip", "exclude", "budget")
"""Parts of a file that say which trials there are, and nothing else: they may change as long as all trials stay."""

GROWS = ("search.samples", "search.enqueue")
MAY_BEGIN = ("search.algorithm", "search.sampler", "search.seed")
"""How points are drawn: a grid has drawn none, so that these may then change with it."""

MAX_NAMED = 5


@dataclass(frozen=True)
class Restated:
    """Where an existing trial stands in the file as it is now."""

    trial: TrialRow
    candidate: Candidate

    @property
    def is_news(self) -> bool:
        before = self.trial.candidate
        return any(
            value_key(old) != value_key(new)
            for old, new in zip(vars(before).values(), vars(self.candidate).values(), strict=True)
        )

    @property
    def config_hash(self) -> str:
        return config_hash(self.candidate.params)


@dataclass(frozen=True)
class Extension:
    """A sweep and what a file makes of it. `differences`: what decides which trials exist or what they compute."""

    spec: SweepSpec
    differences: Sequence[str]
    obstacles: Sequence[str]  # why it is no extension, other than trials outside
    places: Sequence[Restated]
    outside: Sequence[TrialRow]
    num_new: int  # trials to be added; of an Optuna search at most so many

    @property
    def is_possible(self) -> bool:
        return not self.obstacles and not self.outside

    @property
    def known(self) -> list[Params]:
        """The parameters of existing trials, in the words of the file as it is now."""
        return [one.candidate.params for one in self.places]

    def refusal(self) -> list[str]:
        """Why it is none, in lines."""
        lines = [*self.differences, *self.obstacles]
        if self.outside:
            axes = list(self.spec.axes)
            named = [f"{row.number} ({_in_words(row, axes)})" for row in self.outside[:MAX_NAMED]]
            num, num_unnamed = len(self.outside), len(self.outside) - MAX_NAMED
            more = f" and {num_unnamed} more" if num_unnamed > 0 else ""
            lines.append(f"it leaves out {num} of {num + len(self.places)} trials: {', '.join(named)}{more}")
        return lines


def extension_of(sweep: SweepRow, trials: Sequence[TrialRow], spec: SweepSpec, workload: Description) -> Extension:
    """What `spec` makes of a sweep with these trials.

    Where nothing differs that has a meaning for the trials, all of them stay where they are.
    """
    stated = to_json(spec)
    differences = [*spec_difference(sweep.spec, stated), *_budget_difference(sweep.spec, stated)]
    if not differences:
        return Extension(spec, [], [], [Restated(row, row.candidate) for row in trials], [], 0)
    if fixed := _fixed_for_good(sweep.spec, differences):
        return Extension(spec, differences, [f"only what adds trials may change, not {', '.join(fixed)}"], [], [], 0)
    placed, num_new = _Space(spec, workload).place(trials)
    obstacles = []
    if spec.schedule.algorithm == "pbt" and num_new:
        obstacles.append("scheduler pbt: a population that has been trained takes no new members")
    places = [Restated(row, candidate) for row, candidate in placed if candidate is not None]
    outside = [row for row, candidate in placed if candidate is None]
    return Extension(spec, differences, obstacles, places, outside, num_new)


def with_kept_points(spec: SweepSpec, trials: Iterable[Params]) -> SweepSpec:
    """The spec that tries first what its sweep has tried, if its own draws would miss some: after a wider range, say.

    So these points count among the samples, and get the seeds that are new. Each cell has its own ones first, which it
    may not lose, then what `enqueue` asks for and none of them is, and then those of the others: all compare the same
    draws. `trials` are in the words of the spec.
    """
    if not spec.sampled_axes or not isinstance(searcher := make_searcher(spec), ListedSearcher):
        return spec
    trials = list(trials)
    drawn = {trial_key(spec, candidate.params) for candidate in searcher.ask([]) or ()}
    if all(trial_key(spec, params) in drawn for params in trials):
        return spec
    own = distinct({axis: params[axis] for axis in _active(spec, params)} for params in trials)
    points = distinct({axis: value for axis, value in one.items() if axis in spec.sampled_axes} for one in own)
    untried = [entry for entry in spec.search.enqueue if not any(_is_part(entry, one) for one in own)]
    first = distinct([*own, *untried, *(_fullest(points) if spec.when else points)])
    return replace(spec, search=replace(spec.search, enqueue=first))


def _fullest(points: Sequence[Params]) -> list[Params]:
    """Without those that a longer one holds: a cell in which more axes exist has drawn them to their end."""
    longest = max(map(len, points), default=0)
    return [
        one
        for one in points
        if len(one) == longest or not any(len(other) > len(one) and _is_part(one, other) for other in points)
    ]


def _is_part(one: Params, other: Params) -> bool:
    return all(axis in other and same_value(value, other[axis]) for axis, value in one.items())


def _active(spec: SweepSpec, params: Params) -> list[str]:
    return [axis for axis in spec.axes if axis != SEED and is_active(spec, axis, params)]


def _budget_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Of the number of trials, which is one of how many samples there are. A limit of time adds and removes none."""
    before, after = ((stated.get("budget") or {}).get("trials") for stated in (old, new))
    return [] if before == after else [f"budget.trials: {before or 'not set'} -> {after or 'not set'}"]


def _fixed_for_good(old: Mapping[str, Any], differences: Sequence[str]) -> list[str]:
    """Those of the settings that differ which must not: they say what a trial computes, or how points are drawn."""
    began_as_grid = old["search"].get("algorithm", "grid") == "grid"
    paths = [line.split(":")[0] for line in differences]
    return [
        path
        for path in paths
        if path.split(".")[0] not in SPACE and path not in GROWS and not (path in MAY_BEGIN and began_as_grid)
    ]


Placed = list[tuple["TrialRow", Candidate | None]]


class _Space:
    """All that a spec can try."""

    def __init__(self, spec: SweepSpec, workload: Description) -> None:
        self._spec, self._workload = spec, workload
        self._defaults = {name: field.default for name, field in workload.fields().items()}
        self._cells = cells_of(spec)
        self._replicates = {value_key(one) for one in replicates_of(spec)}

    def place(self, trials: Sequence[TrialRow]) -> tuple[Placed, int]:
        """Each trial with its candidate, or None where the spec has no place for it; and how many more it has."""
        if not isinstance(make_searcher(self._spec), ListedSearcher):
            placed = self._numbered([(row, self._point(row)) for row in trials])
            return placed, max(0, plan_count(self._spec) - len(placed))
        listed = self._listed(self._spec)
        placed = self._claims(trials, listed)
        if any(candidate is None for _, candidate in placed):
            points = [candidate or self._point(row) for row, candidate in placed]
            listed = self._listed(with_kept_points(self._spec, [one.params for one in points if one is not None]))
            placed = self._claims(trials, listed)
        return placed, sum(map(len, listed.values()))

    def _claims(self, trials: Sequence[TrialRow], listed: dict[str, list[Candidate]]) -> Placed:
        """Each trial with its candidate, which leaves the list."""
        return [(row, _claimed(row, listed.get(self._identity_of(row), []))) for row in trials]

    def _listed(self, spec: SweepSpec) -> dict[str, list[Candidate]]:
        """Every candidate by what it computes: two may compute the same, as where `auto` means true."""
        listed: dict[str, list[Candidate]] = {}
        for candidate in make_searcher(spec).ask([]) or ():
            listed.setdefault(self._identity(candidate.params), []).append(candidate)
        return listed

    def _point(self, row: TrialRow) -> Candidate | None:
        """The trial as one that the axes may give, though no list has it."""
        spec = self._spec
        values = settled(spec, {axis: self._value(row, axis) for axis in spec.axes})
        active = [axis for axis in spec.axes if is_active(spec, axis, values)]
        if excluded(spec, values) or not all(contains(spec.axes[axis], values[axis]) for axis in active):
            return None
        cell = {axis: values[axis] for axis in spec.grid_axes}
        point = {axis: values[axis] for axis in spec.sampled_axes}
        replicate = {} if spec.seeds is None else {SEED: values[SEED]}
        if value_key(replicate) not in self._replicates or not self._is_cell(cell, point):
            return None
        found = make_candidate(spec, cell, point, replicate, row.sample)
        return found if self._identity(found.params) == self._identity_of(row) else None

    def _is_cell(self, cell: Params, point: Params) -> bool:
        """True for one of the spec's, axes that the point switches off aside."""
        key = value_key(cell)
        return any(
            value_key({axis: values[axis] for axis in cell}) == key
            for values in (settled(self._spec, {**one, **point}) for one in self._cells)
        )

    def _value(self, row: TrialRow, axis: str) -> Any:
        """What the trial has on an axis: as its file said, else as it was resolved, else the default it came from."""
        options = [values[axis] for values in (row.params, row.config, self._defaults) if axis in values]
        return next((value for value in options if contains(self._spec.axes[axis], value)), options[0])

    def _identity(self, params: Params) -> str:
        return value_key(flatten(resolved(self._spec, self._workload.resolve, params)))

    def _identity_of(self, row: TrialRow) -> str:
        """Of its stored config; a field that the workload has had only since then is at its default."""
        return value_key({name: row.config.get(name, default) for name, default in self._defaults.items()})

    def _numbered(self, placed: Placed) -> Placed:
        """Gives each sampled point of a cell a number of its own below `samples`: its old one where that is free."""
        numbers: dict[str, dict[str, int]] = {}  # cell -> point -> number
        found: Placed = []
        for row, candidate in placed:
            if candidate is None:
                found.append((row, None))
                continue
            point = value_key({axis: candidate.params[axis] for axis in self._spec.sampled_axes})
            number = _number(
                numbers.setdefault(value_key(candidate.cell), {}), point, row.sample, samples_of(self._spec)
            )
            found.append((row, None if number is None else replace(candidate, sample=number)))
        return found


def _claimed(row: TrialRow, candidates: list[Candidate]) -> Candidate | None:
    """The one with the same parameters, else any that computes the same; nobody else gets it."""
    key = value_key(row.params)
    found = next((one for one in candidates if value_key(one.params) == key), next(iter(candidates), None))
    if found is not None:
        candidates.remove(found)
    return found


def _number(taken: dict[str, int], point: str, wish: int | None, samples: int) -> int | None:
    """The point's number in its cell; None when the cell has all the points that it may have."""
    if point not in taken:
        wishes = [*(() if wish is None else (wish,)), *range(samples)]
        free = next((number for number in wishes if number < samples and number not in taken.values()), None)
        if free is None:
            return None
        taken[point] = free
    return taken[point]


def _in_words(row: TrialRow, axes: Sequence[str]) -> str:
    """Its values on the axes that the file names now."""
    return ", ".join(f"{axis}={short(row.config[axis])}" for axis in axes if axis in row.config) or "no axis"
