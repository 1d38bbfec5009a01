"""The searcher whose candidates are known beforehand: a grid, random draws or a low-discrepancy sequence.

Learns nothing from results. Order: the first seed of everything, then the next seed; within a seed sample by sample,
within a sample cell by cell. So the first results cover all cells, and an interrupted sweep still compares them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.search.random_search import Draw, Points, random_draw
from orchestrator.search.searcher import (
    cells_of,
    few_points_note,
    make_candidate,
    replicates_of,
    samples_of,
    shares_configurations,
    trial_key,
)
from orchestrator.spec.relations import excluded
from orchestrator.spec.sweep_spec import SEED, SweepSpec
from orchestrator.trial import Candidate, Told


class ListedSearcher:
    """Gives every candidate that is not yet known, once."""

    def __init__(self, spec: SweepSpec, draw: Draw | None = None) -> None:
        self._spec = spec
        self._given = False
        samples = samples_of(spec)
        points = Points(spec, samples, draw or random_draw(spec))
        self._cells = [(cell, points.of(cell)) for cell in cells_of(spec)]
        self.num_points = [len(found) for _, found in self._cells]  # by cell
        note = few_points_note(spec.sampled_axes, samples, self.num_points) if spec.sampled_axes else ""
        self.notes: list[str] = [note] if note else []

    def ask(self, history: Sequence[Told]) -> Sequence[Candidate] | None:
        if self._given:
            return None
        self._given = True
        known = {trial_key(self._spec, told.candidate.params) for told in history}
        if not known and not shares_configurations(self._spec):
            return list(self._all()) or None
        fresh: dict[str, Candidate] = {}
        for item in self._all():
            fresh.setdefault(trial_key(self._spec, item.params), item)
        return [item for key, item in fresh.items() if key not in known] or None

    def _all(self) -> Iterator[Candidate]:
        """Every candidate of the sweep; those that two cells share are given twice."""
        spec = self._spec
        number_if = bool(spec.sampled_axes)
        seeds_matter = any(SEED in one for one in spec.exclude)
        for replicate in replicates_of(spec):
            for number in range(max((len(points) for _, points in self._cells), default=0)):
                for cell, points in self._cells:
                    if number >= len(points):
                        continue
                    candidate = make_candidate(spec, cell, points[number], replicate, number if number_if else None)
                    if not (seeds_matter and excluded(spec, candidate.params)):
                        yield candidate
