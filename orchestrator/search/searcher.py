"""What a searcher is, and what all share: cells, replicates, candidates. Pure: no storage, no clock, no cluster.

A *cell* is one combination of the grid axes without `seed`; a *point* is one value for each sampled axis; a *replicate*
is a seed. A configuration is a cell with a point; it is trained once for every replicate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from orchestrator.spec.domains import Domain, value_key, values_of
from orchestrator.spec.sweep_spec import SEED, SweepSpec
from orchestrator.trial import Candidate, Params, Told

MAX_LISTED = 100_000  # a space of at most so many points is known point by point


class Searcher(Protocol):
    """Decides what to try next from everything known so far."""

    @property
    def notes(self) -> Sequence[str]:
        """What the reader of a plan or of a finished sweep should know; may grow with `ask`."""

    def ask(self, history: Sequence[Told]) -> Sequence[Candidate] | None:
        """The next candidates to add, none of them in `history`.

        `history` holds every trial of the sweep so far, waiting and running ones included, by trial number. An empty
        answer means: nothing before more results are in. None means: nothing more will come.
        """


def cells_of(spec: SweepSpec) -> list[dict[str, Any]]:
    """All combinations of the grid axes in file order, the last axis fastest; one empty cell without axes."""
    axes = spec.grid_axes
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def replicates_of(spec: SweepSpec) -> list[dict[str, Any]]:
    """`{"seed": value}` for each seed; one empty replicate when the seed is no axis."""
    return [{}] if spec.seeds is None else [{SEED: seed} for seed in spec.seeds]


def make_candidate(
    spec: SweepSpec, cell: Params, point: Params, replicate: Params, sample: int | None = None
) -> Candidate:
    values = {**cell, **point, **replicate}
    return Candidate({**spec.fixed, **{name: values[name] for name in spec.axes}}, dict(cell), sample)


def trial_key(spec: SweepSpec, params: Params) -> str:
    """Identifies a trial among those of its sweep, whichever way its parameters were stored."""
    return value_key({name: params.get(name) for name in spec.axes})


def space_size(axes: Mapping[str, Domain]) -> int | None:
    """How many points the sampled axes have; None for a continuous space or one beyond `MAX_LISTED`."""
    values = [values_of(axis, MAX_LISTED) for axis in axes.values()]
    if any(options is None for options in values):
        return None
    size = math.prod(len(options) for options in values if options is not None)
    return size if size <= MAX_LISTED else None


def all_points(axes: Mapping[str, Domain]) -> list[dict[str, Any]]:
    """Every point of a space whose `space_size` is known."""
    values = [values_of(axis, MAX_LISTED) or () for axis in axes.values()]
    return [dict(zip(axes, point, strict=True)) for point in itertools.product(*values)]


def few_points_note(axes: Mapping[str, Domain], samples: int, found: int) -> str:
    return f"{', '.join(axes)}: only {found} distinct points; samples: {samples} gives {found} per cell"
