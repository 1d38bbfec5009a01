"""The searcher whose candidates are known beforehand: a grid, or random draws. Learns nothing from results.

Order: the first seed of everything, then the next seed; within a seed sample by sample, within a sample cell by cell.
So the first results cover all cells, and an interrupted sweep still compares them.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.search.random_search import draw_points
from orchestrator.search.searcher import cells_of, few_points_note, make_candidate, replicates_of, trial_key
from orchestrator.spec.sweep_spec import SweepSpec
from orchestrator.trial import Candidate, Told


class ListedSearcher:
    """Gives every candidate that is not yet known, once."""

    def __init__(self, spec: SweepSpec) -> None:
        self._spec = spec
        self._given = False
        self._points = draw_points(spec)
        self.notes: list[str] = []
        samples = spec.search.samples
        if samples is not None and len(self._points) < samples:
            self.notes.append(few_points_note(spec.sampled_axes, samples, len(self._points)))

    def ask(self, history: Sequence[Told]) -> Sequence[Candidate] | None:
        if self._given:
            return None
        self._given = True
        known = {trial_key(self._spec, told.candidate.params) for told in history}
        fresh = [item for item in self._all() if not known or trial_key(self._spec, item.params) not in known]
        return fresh or None

    def _all(self) -> list[Candidate]:
        spec, cells = self._spec, cells_of(self._spec)
        is_sampled = bool(spec.sampled_axes)
        return [
            make_candidate(spec, cell, point, replicate, number if is_sampled else None)
            for replicate in replicates_of(spec)
            for number, point in enumerate(self._points)
            for cell in cells
        ]
