"""Optuna's TPE by ask and tell. One study a cell, in memory, rebuilt from the history at every ask; stores nothing.

Because each study is made of the history alone and each sampler is seeded by (search.seed, cell, sample number), a
resumed search goes on as the uninterrupted one would when one configuration runs at a time. Non-finite results are
failures before Optuna sees them; a configuration that is still running is shown as such: TPE avoids its neighbourhood.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import fmean
from typing import Any

import optuna
from optuna.trial import TrialState as StudyState

from orchestrator.search.optuna_space import encode, has_nested_domain, suggest
from orchestrator.search.random_search import unseen_points
from orchestrator.search.searcher import cells_of, few_points_note, make_candidate, replicates_of, space_size, trial_key
from orchestrator.spec.domains import value_key
from orchestrator.spec.sweep_spec import SweepSpec
from orchestrator.trial import Candidate, Params, Told, TrialState

MAX_REPEATS = 10
"""So many known points in a row mean that Optuna has no new idea for this cell."""


@dataclass
class Configuration:
    """One point of a cell with what is known of its replicates."""

    point: Params
    told: list[Told] = field(default_factory=list)

    def outcome(self, num_replicates: int) -> tuple[StudyState, float | None]:
        """COMPLETE with the mean objective, FAIL if any replicate has no finite one, RUNNING until all are over."""
        if len(self.told) < num_replicates or not all(told.state.is_over for told in self.told):
            return StudyState.RUNNING, None
        values = [told.objective for told in self.told if told.state in (TrialState.FINISHED, TrialState.STOPPED)]
        finite = [value for value in values if value is not None and isfinite(value)]
        if len(finite) < len(self.told):
            return StudyState.FAIL, None
        return StudyState.COMPLETE, fmean(finite)


Known = dict[str, Configuration]  # by value_key of the point, in order of appearance


class OptunaSearcher:
    """Suggests one configuration at a time, with all its seeds, for the cell that has the fewest."""

    def __init__(self, spec: SweepSpec) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # it announces each study and trial otherwise
        self.notes: list[str] = []
        self._spec = spec
        self._cells = {value_key(cell): cell for cell in cells_of(spec)}
        self._replicates = replicates_of(spec)
        self._samples = spec.search.samples or 1
        self._given: dict[str, Candidate] = {}
        self._exhausted: set[str] = set()

    def ask(self, history: Sequence[Told]) -> Sequence[Candidate] | None:
        """All seeds of one new configuration, after those that known ones lack. None when all cells are full.

        Nothing while a trial waits: its result may teach something, as when an interrupted one is to be trained again.
        """
        if any(told.state is TrialState.WAITING for told in history):
            return []
        known, trials = self._sort(history)
        batch = self._missing(known, trials) or self._next(known)
        self._given.update((trial_key(self._spec, item.params), item) for item in batch)
        return batch or None

    def _sort(self, history: Sequence[Told]) -> tuple[dict[str, Known], set[str]]:
        """The history by cell and point, and the keys of its trials. What was given out but not told of is running."""
        told = {trial_key(self._spec, item.candidate.params): item for item in history}
        for key, item in self._given.items():
            told.setdefault(key, Told(item, TrialState.RUNNING, None))
        known: dict[str, Known] = {key: {} for key in self._cells}
        for one in told.values():
            params = one.candidate.params
            cell = value_key({name: params.get(name) for name in self._spec.grid_axes})
            point = {name: params.get(name) for name in self._spec.sampled_axes}
            if cell in known:  # a cell may have left the file since
                known[cell].setdefault(value_key(point), Configuration(point)).told.append(one)
        return known, set(told)

    def _missing(self, known: Mapping[str, Known], trials: set[str]) -> list[Candidate]:
        """Replicates that a crash or a later change of `seeds` left out."""
        return [
            candidate
            for cell, configurations in known.items()
            for number, configuration in enumerate(configurations.values())
            if len(configuration.told) < len(self._replicates)
            for candidate in self._batch(cell, configuration.point, number)
            if trial_key(self._spec, candidate.params) not in trials
        ]

    def _next(self, known: Mapping[str, Known]) -> list[Candidate]:
        open_cells = [key for key in known if key not in self._exhausted and len(known[key]) < self._samples]
        for cell in sorted(open_cells, key=lambda key: len(known[key])):
            point = self._suggest(cell, known[cell])
            if point is not None:
                return self._batch(cell, point, len(known[cell]))
            self._exhaust(cell, len(known[cell]))
        return []

    def _batch(self, cell: str, point: Params, number: int) -> list[Candidate]:
        return [make_candidate(self._spec, self._cells[cell], point, item, number) for item in self._replicates]

    def _suggest(self, cell: str, known: Known) -> Params | None:
        """A new point; None when the space is used up or Optuna keeps repeating itself in one too large to list."""
        axes = self._spec.sampled_axes
        size = space_size(axes)
        if size is not None and len(known) >= size:
            return None
        seed = _seed(self._spec.search.seed, cell, len(known))
        study = self._study(known, seed)
        for _ in range(MAX_REPEATS):
            trial = study.ask()
            point = {name: suggest(trial, name, axis) for name, axis in axes.items()}
            repeated = known.get(value_key(point))
            if repeated is None:
                return point
            self._tell(study, trial, repeated)
        return unseen_points(self._spec, set(known), random.Random(seed))[0] if size is not None else None

    def _study(self, known: Known, seed: int) -> optuna.Study:
        # A range inside a choice exists in some trials only, so that no joint model of all axes can hold it.
        is_joint = not any(has_nested_domain(axis) for axis in self._spec.sampled_axes.values())
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=is_joint, constant_liar=True)
        direction = "minimize" if self._spec.metric.mode == "min" else "maximize"
        study = optuna.create_study(sampler=sampler, direction=direction)
        for configuration in known.values():
            self._add(study, configuration)
        return study

    def _add(self, study: optuna.Study, configuration: Configuration) -> None:
        axes = self._spec.sampled_axes
        encoded = [encode(name, axis, configuration.point[name]) for name, axis in axes.items()]
        if any(part is None for part in encoded):
            return  # from before the file's ranges were changed: not expressible in this space
        state, value = configuration.outcome(len(self._replicates))
        params: dict[str, Any] = {}
        distributions: dict[str, Any] = {}
        for some_params, some_distributions in filter(None, encoded):
            params |= some_params
            distributions |= some_distributions
        trial = optuna.trial.create_trial(state=state, value=value, params=params, distributions=distributions)
        study.add_trial(trial)

    def _tell(self, study: optuna.Study, trial: Any, repeated: Configuration) -> None:
        """Tells the known result of a repeated point; one that still runs stays so, as this study ends with the ask."""
        state, value = repeated.outcome(len(self._replicates))
        if state is not StudyState.RUNNING:
            study.tell(trial, value, state=state)

    def _exhaust(self, cell: str, found: int) -> None:
        self._exhausted.add(cell)
        note = few_points_note(self._spec.sampled_axes, self._samples, found)
        if note not in self.notes:
            self.notes.append(note)


def _seed(search_seed: int, cell: str, number: int) -> int:
    digest = hashlib.sha256(f"{search_seed}|{cell}|{number}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
