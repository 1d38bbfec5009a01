"""Optuna's samplers by ask and tell. One study a cell, in memory, rebuilt from the history at each ask; stores nothing.

Because each study is made of the history alone and each sampler is seeded by (search.seed, cell, sample number), a
resumed search goes on as the uninterrupted one would when one configuration runs at a time. Non-finite results are
failures before Optuna sees them; a configuration that is still running is shown as such: TPE and GP keep away from it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import optuna
from optuna.trial import TrialState as StudyState

from orchestrator.search.configurations import Configuration, Grouping, Known, Result
from orchestrator.search.optuna_samplers import directions_of, make_sampler
from orchestrator.search.optuna_space import Encoded, encode, encode_point, suggest
from orchestrator.search.random_search import MAX_REPEATS as MAX_DRAWS
from orchestrator.search.random_search import listing_limit, random_draw, unseen_points
from orchestrator.search.searcher import (
    axes_in_order,
    deciding_axes,
    enqueued_in,
    few_points_note,
    make_candidate,
    points_in,
    replicates_of,
    samples_of,
    settled_point,
    trial_key,
)
from orchestrator.spec.domains import same_value, value_key
from orchestrator.spec.relations import is_active
from orchestrator.spec.sweep_spec import SweepSpec
from orchestrator.trial import Candidate, Params, Told, TrialState

MAX_REPEATS = 10
"""So many known or excluded points in a row mean that Optuna has no new idea; then one is drawn at random."""

GENERATIONAL = ("cmaes", "nsga2")
"""Samplers that move on while they are asked and leave a mark on each trial, so they are asked for known ones too."""


class OptunaSearcher:
    """Suggests one configuration at a time, with all its seeds, for the cell that has the fewest."""

    def __init__(self, spec: SweepSpec) -> None:
        self.notes: list[str] = []
        self._spec = spec
        self._samples = samples_of(spec)
        self._order, self._deciding = axes_in_order(spec), deciding_axes(spec)
        self._grouping = Grouping(spec)
        self._given: dict[str, Candidate] = {}
        self._exhausted: set[str] = set()
        self._listings: dict[str, list[dict[str, Any]] | None] = {}
        self._kept: dict[str, tuple[list[tuple[str, Result]], list[optuna.trial.FrozenTrial]]] = {}

    def ask(self, history: Sequence[Told]) -> Sequence[Candidate] | None:
        """All seeds of one new configuration, after those that known ones lack. None when all cells are full.

        Nothing while a trial waits: its result may teach something, as when an interrupted one is to be trained again.
        """
        if any(told.state is TrialState.WAITING for told in history):
            return []
        told = {self._grouping.place(item.candidate.params).trial: item for item in history}
        for key, candidate in self._given.items():  # what was given out but not told of is running
            told.setdefault(key, Told(candidate, TrialState.RUNNING, None))
        known = self._grouping.known(told.values())
        batch = self._missing(known, told) or self._next(known)
        self._given.update((trial_key(self._spec, item.params), item) for item in batch)
        return batch or None

    def _missing(self, known: Mapping[str, Known], told: Mapping[str, Told]) -> list[Candidate]:
        """Replicates that a crash or a later change of `seeds` left out."""
        wanted = {
            trial_key(self._spec, candidate.params): candidate
            for cell, configurations in known.items()
            for number, configuration in enumerate(configurations.values())
            if not configuration.is_whole
            for candidate in self._batch(cell, configuration.point, number)
        }
        return [candidate for key, candidate in wanted.items() if key not in told]

    def _next(self, known: Mapping[str, Known]) -> list[Candidate]:
        open_cells = [key for key in known if key not in self._exhausted and len(known[key]) < self._samples]
        for cell in sorted(open_cells, key=lambda key: len(known[key])):
            point = self._suggest(cell, known[cell])
            if point is not None:
                return self._batch(cell, point, len(known[cell]))
            self._exhausted.add(cell)
        self._note_few_points(known)
        return []

    def _note_few_points(self, known: Mapping[str, Known]) -> None:
        counts = [len(configurations) for configurations in known.values()]
        note = few_points_note(self._spec.sampled_axes, self._samples, counts)
        if note and note not in self.notes:
            self.notes.append(note)

    def _batch(self, cell_key: str, point: Params, number: int) -> list[Candidate]:
        cell = self._grouping.cells[cell_key]
        replicates = replicates_of(self._spec, {**cell, **point})
        return [make_candidate(self._spec, cell, point, item, number) for item in replicates]

    def _suggest(self, cell_key: str, known: Known) -> Params | None:
        """A new point; None when the space is used up."""
        cell = self._grouping.cells[cell_key]
        listed = self._listed(cell)
        if listed is not None and all(value_key(point) in known for point in listed):
            return None
        seed = _seed(self._spec.search.seed, cell_key, len(known))
        study = self._study(cell_key, known, seed)
        first = enqueued_in(self._spec, cell)
        untried = [one for one in first if not any(self._has(item, one) for item in known.values())]
        for named in [*untried, *[{}] * MAX_REPEATS]:
            trial, point = self._ask(study, cell, named)
            repeated = known.get(value_key(point))
            if repeated is None and settled_point(self._spec, cell, point) is not None:
                return point
            result = repeated.result(len(self._spec.objectives)) if repeated else Result(StudyState.FAIL)
            _tell(study, trial, result)  # one that still runs stays so, as this study ends with the ask
        return self._draw(cell, known, listed, seed)

    def _has(self, configuration: Configuration, named: Params) -> bool:
        """True if it has the values of an entry of `enqueue`, as far as their axes exist there."""
        values = {name: value for name, value in named.items() if is_active(self._spec, name, configuration.params)}
        return all(same_value(configuration.point[name], value) for name, value in values.items())

    def _listed(self, cell: Params) -> list[dict[str, Any]] | None:
        """All points of a small space, listed once for all cells that are alike in what decides about points."""
        key = value_key({name: value for name, value in cell.items() if name in self._deciding})
        if key not in self._listings:
            self._listings[key] = points_in(self._spec, cell, listing_limit(self._samples))
        return self._listings[key]

    def _draw(self, cell: Params, known: Known, listed: list[dict[str, Any]] | None, seed: int) -> Params | None:
        """A new point at random, where Optuna has none."""
        if listed is not None:
            return unseen_points(listed, known, random.Random(seed))[0]
        draw = random_draw(self._spec)
        points = (settled_point(self._spec, cell, draw(seed + number)) for number in range(MAX_DRAWS))
        return next((point for point in points if point is not None and value_key(point) not in known), None)

    def _ask(self, study: optuna.Study, cell: Params, named: Params) -> tuple[optuna.Trial, dict[str, Any]]:
        """A trial with a value for each axis that exists; those of `named` as they are, if they exist."""
        sampled = self._spec.sampled_axes
        if named:
            encoded = [encode(name, sampled[name], value) for name, value in named.items()]
            study.enqueue_trial({name: value for part in encoded if part for name, value in part[0].items()})
        trial, values = study.ask(), dict(cell)
        for name in self._order:
            if not is_active(self._spec, name, values):
                values[name] = self._spec.when[name].otherwise
            elif name in sampled:
                values[name] = suggest(trial, name, sampled[name])
        return trial, {name: values[name] for name in sampled}

    def _study(self, cell_key: str, known: Known, seed: int) -> optuna.Study:
        """The study of a cell with everything known in it, and a sampler that has not been asked yet.

        What the last ask knew of configurations that were over is taken from there, marks of generations included.
        """
        directions = directions_of(self._spec)
        study = optuna.create_study(sampler=make_sampler(self._spec, seed, self._samples), directions=directions)
        rows = [(key, one.result(len(directions)), encode_point(self._spec, one.params)) for key, one in known.items()]
        rows = [row for row in rows if row[2] is not None]
        over = [(key, result) for key, result, _ in takewhile(lambda row: row[1].state is not StudyState.RUNNING, rows)]
        kept, trials = self._kept.get(cell_key, ([], []))
        num_kept = len(kept) if over[: len(kept)] == kept else 0
        study.add_trials(trials[:num_kept])
        for _, result, encoded in rows[num_kept:]:
            assert encoded is not None
            self._replay(study, encoded, result)
        self._kept[cell_key] = over, study.get_trials(deepcopy=False)[: len(over)]
        study.sampler = make_sampler(self._spec, seed, self._samples)
        return study

    def _replay(self, study: optuna.Study, encoded: Encoded, result: Result) -> None:
        params, distributions = encoded
        study.enqueue_trial(params)
        trial = study.ask(distributions)
        if self._spec.search.sampler in GENERATIONAL:
            _ = trial.relative_params
        _tell(study, trial, result)


def _tell(study: optuna.Study, trial: optuna.Trial, result: Result) -> None:
    if result.value_at_step is not None and result.step is not None:
        trial.report(result.value_at_step, result.step)
    if result.state is not StudyState.RUNNING:
        study.tell(trial, result.values, result.state)


def _seed(search_seed: int, cell: str, number: int) -> int:
    digest = hashlib.sha256(f"{search_seed}|{cell}|{number}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
