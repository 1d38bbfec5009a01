"""Which searcher a spec asks for, how many trials it will make and what stands against it, before anything starts."""

from __future__ import annotations

from importlib.util import find_spec

from orchestrator.search.listed import ListedSearcher
from orchestrator.search.random_search import Points, listing_limit, random_draw
from orchestrator.search.searcher import (
    Searcher,
    cells_of,
    deciding_axes,
    few_points_note,
    fits,
    late_axes,
    points_in,
    replicates_of,
    samples_of,
    shares_configurations,
    trials_per_sample,
)
from orchestrator.spec.domains import Choice, Int, Uniform, value_key
from orchestrator.spec.sweep_spec import SEED, SweepSpec
from orchestrator.spec.yaml_text import flow
from orchestrator.trial import Candidate

NEEDS = {"gp": ("torch", "scipy"), "qmc": ("scipy",), "cmaes": ("cmaes",)}
"""What Optuna's samplers import beyond Optuna's own requirements; each is an extra of that name."""


def make_searcher(spec: SweepSpec) -> Searcher:
    """A fresh searcher; give it the history of an interrupted sweep and it goes on where that one ended."""
    if (listed := _listed_searcher(spec)) is not None:
        return listed
    from orchestrator.search.optuna_search import OptunaSearcher  # Optuna takes half a second to import

    return OptunaSearcher(spec)


def _listed_searcher(spec: SweepSpec) -> ListedSearcher | None:
    """None for a search that learns from results."""
    if spec.search.algorithm != "optuna":
        return ListedSearcher(spec)
    if spec.search.sampler != "qmc":
        return None
    from orchestrator.search.optuna_samplers import qmc_draw

    return ListedSearcher(spec, qmc_draw(spec))


def points_by_cell(spec: SweepSpec) -> list[int]:
    """Configurations of each cell: `samples`, or fewer where the sampled axes have fewer points or none is active."""
    samples, cells = samples_of(spec), cells_of(spec)
    if spec.search.algorithm != "optuna":
        return ListedSearcher(spec).num_points
    deciding, found = deciding_axes(spec), dict[str, int]()
    keys = [value_key({name: value for name, value in cell.items() if name in deciding}) for cell in cells]
    for key, cell in zip(keys, cells, strict=True):
        if key not in found:
            points = points_in(spec, cell, listing_limit(samples))
            found[key] = samples if points is None else min(samples, len(points))
    return [found[key] for key in keys]


def plan_count(spec: SweepSpec) -> int:
    """How many trials the sweep will have when it is finished; at most so many where `is_upper_bound`."""
    is_uneven = shares_configurations(spec) or any(SEED in one for one in spec.exclude)
    if is_uneven and (listed := listed_candidates(spec)) is not None:
        return len(listed)
    cells = cells_of(spec)
    return sum(count * len(replicates_of(spec, cell)) for count, cell in zip(points_by_cell(spec), cells, strict=True))


def is_upper_bound(spec: SweepSpec) -> bool:
    """True where what Optuna will draw decides how many trials there are.

    A grid axis exists or not by a sampled one, or `exclude` names a seed together with a sampled axis.
    """
    learns = spec.search.algorithm == "optuna" and spec.search.sampler != "qmc"
    by_draw = any(SEED in one and one.keys() & spec.sampled_axes.keys() for one in spec.exclude)
    return learns and (by_draw or shares_configurations(spec))


def listed_candidates(spec: SweepSpec) -> list[Candidate] | None:
    """Every trial; None of a search that learns from results."""
    searcher = _listed_searcher(spec)
    return None if searcher is None else list(searcher.ask([]) or ())


def plan_notes(spec: SweepSpec) -> tuple[str, ...]:
    """The spec's own notes; what a budget leaves; what of `enqueue` is not tried; cells with fewer points than samples;
    what a sampler does not learn about.
    """
    samples, wanted = samples_of(spec), spec.search.samples
    if wanted is None or not spec.sampled_axes:
        return spec.notes
    notes = list(spec.notes)
    if samples < wanted:
        notes.append(f"budget.trials: {spec.budget.trials} has room for {samples} samples per cell, not {wanted}")
    notes += _enqueue_notes(spec, samples)
    if note := few_points_note(spec.sampled_axes, samples, points_by_cell(spec)):
        notes.append(note)
    if spec.search.algorithm == "optuna" and (unlearned := _unlearned_axes(spec)):
        notes.append(f"sampler {spec.search.sampler} draws {', '.join(unlearned)} at random: it has no model of them")
    return tuple(notes)


def _enqueue_notes(spec: SweepSpec, samples: int) -> list[str]:
    entries = spec.search.enqueue
    if not entries:
        return []
    fitting = [[fits(spec, one, cell) for one in entries] for cell in cells_of(spec)]
    by_entry = zip(entries, zip(*fitting, strict=True), strict=True)
    notes = [f"search.enqueue: {flow(one)} fits no cell and is not tried" for one, those in by_entry if not any(those)]
    most = max(map(sum, fitting))
    if most > samples:
        notes.append(f"search.enqueue: {most} of its points fit one cell, which takes the first {samples} (samples)")
    return notes


def search_problems(spec: SweepSpec) -> list[tuple[str, str]]:
    """What stands against the search, as (path in the file, what is wrong and what would be right)."""
    problems = [("search.sampler", text) for text in (missing_extra(spec), _unfit_sampler(spec)) if text]
    if spec.exclude and _leaves_nothing(spec):
        problems.append(("exclude", "its entries match every point; nothing would be trained"))
    elif spec.sampled_axes and not samples_of(spec):
        least = f"one sample in each cell, with all its seeds, makes {trials_per_sample(spec)} trials"
        problems.append(("budget.trials", f"{spec.budget.trials} is too few: {least}"))
    return problems


def _leaves_nothing(spec: SweepSpec) -> bool:
    points = Points(spec, 1, random_draw(spec))
    return not any(points.of(cell) for cell in cells_of(spec))


def missing_extra(spec: SweepSpec) -> str:
    """That a package is missing for this sampler and the line that installs it; empty when all is there."""
    if spec.search.algorithm != "optuna":
        return ""
    sampler = spec.search.sampler
    missing = [name for name in NEEDS.get(sampler, ()) if find_spec(name) is None]
    if not missing:
        return ""
    return f"sampler {sampler} needs {' and '.join(missing)}: pip install 'orch-sweeps[{sampler}]'"


def _unfit_sampler(spec: SweepSpec) -> str:
    """Why CMA-ES cannot search these axes; the other samplers take any."""
    if spec.search.algorithm != "optuna" or spec.search.sampler != "cmaes":
        return ""
    sampled = spec.sampled_axes
    if conditional := [one for one, axis in sampled.items() if one in late_axes(spec) or _has_range_inside(axis)]:
        return f"cmaes needs axes that always exist, unlike {', '.join(conditional)}; write sampler: tpe"
    if not any(isinstance(axis, Uniform | Int) for axis in sampled.values()):
        return "cmaes needs an axis with a range; write sampler: tpe"
    return ""


def _unlearned_axes(spec: SweepSpec) -> list[str]:
    """Axes that Optuna's sampler leaves to its random one. (TPE models them one by one.)"""
    sampled, sampler = spec.sampled_axes, spec.search.sampler
    if sampler == "cmaes":
        return [name for name, axis in sampled.items() if isinstance(axis, Choice)]
    if sampler in ("gp", "nsga2"):
        conditional = [name for name in sampled if name in late_axes(spec)]
        return [*conditional, *(f"the ranges in {name}" for name, axis in sampled.items() if _has_range_inside(axis))]
    return []


def _has_range_inside(axis: object) -> bool:
    return isinstance(axis, Choice) and any(isinstance(one, Choice | Uniform | Int) for one in axis.options)
