"""The short form of `python -m benchmarks search`: what our way of asking Optuna finds, beside Optuna's own loop."""

from __future__ import annotations

import pytest

from benchmarks.search import FUNCTIONS, our_regret, peer_regret, worse_by_chance

NUM_TRIALS, SEEDS = 32, range(6)


@pytest.mark.parametrize("name", ["branin", "noisy quadratic"])
def test_our_optuna_search_is_not_worse_than_study_optimize_nor_than_random_draws(name):
    ours, theirs, blind = (
        [regret(FUNCTIONS[name], sampler, seed, NUM_TRIALS) for seed in SEEDS]
        for regret, sampler in ((our_regret, "tpe"), (peer_regret, "tpe"), (our_regret, "random"))
    )
    # one-sided Mann-Whitney of six against six at 5 %: what two like searches fail once in twenty
    assert worse_by_chance(ours, theirs) >= 0.05
    assert worse_by_chance(ours, blind) >= 0.05
    if name == "branin":  # a search that learns nothing is no better than random draws; noise hides it in so few trials
        assert worse_by_chance(blind, ours) < 0.05


@pytest.mark.parametrize(
    ("name", "optimum"),
    [
        ("branin", {"x": 9.42478, "y": 2.475}),
        ("hartmann6", {"x0": 0.20169, "x1": 0.150011, "x2": 0.476874, "x3": 0.275332, "x4": 0.311652, "x5": 0.6573}),
        ("noisy quadratic", {"x": -0.3, "y": 0.3, "category": "b"}),
    ],
)
def test_the_functions_have_their_published_minima(name, optimum):
    assert FUNCTIONS[name].value(optimum) == pytest.approx(FUNCTIONS[name].minimum, abs=1e-5)  # digits as published
