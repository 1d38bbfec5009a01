"""Optuna's samplers under the names of a sweep file, and its low-discrepancy sequence as a plain list of draws."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import optuna
from optuna.trial import TrialState as StudyState

from orchestrator.search.optuna_space import flat_distributions, suggest
from orchestrator.search.random_search import Draw
from orchestrator.spec.sweep_spec import SweepSpec

optuna.logging.set_verbosity(optuna.logging.WARNING)  # it announces each study and trial otherwise


def make_sampler(spec: SweepSpec, seed: int, samples: int) -> optuna.samplers.BaseSampler:
    """The sampler that `search.sampler` names, with Optuna's defaults but for what the comments say."""
    match spec.search.sampler:
        case "gp":
            return optuna.samplers.GPSampler(seed=seed, warn_independent_sampling=False)
        case "cmaes":
            return optuna.samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
        case "nsga2":
            return optuna.samplers.NSGAIISampler(seed=seed, population_size=population_of(samples))
        case _:  # a liar keeps away from what is still running
            return optuna.samplers.TPESampler(seed=seed, constant_liar=True)


def directions_of(spec: SweepSpec) -> list[str]:
    """Optuna's word for the mode of each metric."""
    return ["minimize" if metric.mode == "min" else "maximize" for metric in spec.objectives]


def population_of(samples: int) -> int:
    """Optuna's 50 members where `samples` has room for four generations of them, else fewer: the first is random."""
    return min(50, max(4, samples // 4))


def qmc_draw(spec: SweepSpec) -> Draw:
    """Points of a scrambled Sobol sequence over all axes, ranges inside choices too; only `search.seed` matters."""
    axes = spec.sampled_axes
    flat = {name: form for axis, domain in axes.items() for name, form in flat_distributions(axis, domain).items()}
    with experimental():
        sampler = optuna.samplers.QMCSampler(scramble=True, seed=spec.search.seed, warn_independent_sampling=False)
    study = optuna.create_study(sampler=sampler)
    study.tell(study.ask(flat), 0.0)  # the sampler takes the space from the first trial

    def draw(number: int) -> dict[str, Any]:
        trial = study.ask()
        point = {name: suggest(trial, name, axis) for name, axis in axes.items()}
        study.tell(trial, state=StudyState.FAIL)
        return point

    return draw


@contextmanager
def experimental() -> Iterator[None]:
    """Without Optuna's remark that an interface may change: constraints.txt holds its version."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield
