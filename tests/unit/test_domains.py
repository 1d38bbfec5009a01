"""Domains by themselves: both ends are reachable, steps read as written, equality across types."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from orchestrator.spec.domains import (
    Choice,
    Grid,
    Int,
    Uniform,
    contains,
    distinct,
    ends,
    last_value,
    sample,
    values_of,
)

DOMAINS = [
    Uniform(0.1, 0.9),
    Uniform(1e-5, 1e-1, log=True),
    Uniform(0.0, 1.0, step=0.1),
    Uniform(0.1, 1.0, log=True, step=0.1),
    Int(1, 4),
    Int(0, 10, step=5),
    Int(1, 1024, log=True),
    Int(8, 64, log=True, step=8),
    Choice((0, Uniform(1e-4, 1e-1, log=True))),
    Choice(([300], [200, 100], None, "a")),
]


@pytest.mark.parametrize("domain", DOMAINS, ids=repr)
def test_every_draw_lies_in_the_domain_and_keeps_its_type(domain):
    rng = random.Random(0)
    draws = [sample(domain, rng) for _ in range(500)]
    assert all(contains(domain, draw) for draw in draws)
    if isinstance(domain, Int | Uniform):
        assert {type(draw) for draw in draws} == {int if isinstance(domain, Int) else float}


@pytest.mark.parametrize("domain", [d for d in DOMAINS if values_of(d, 2000) is not None], ids=repr)
def test_draws_of_a_finite_domain_reach_both_ends(domain):
    rng = random.Random(0)
    draws = [sample(domain, rng) for _ in range(20_000)]
    for end in ends(domain):
        assert end in draws


def test_an_integer_range_gives_each_value_its_share():
    rng = random.Random(1)
    counts = Counter(sample(Int(1, 4), rng) for _ in range(4000))
    assert set(counts) == {1, 2, 3, 4}
    assert all(800 < count < 1200 for count in counts.values())  # mean 1000, standard deviation 27


def test_steps_are_the_numbers_a_person_would_write():
    assert values_of(Uniform(0.0, 0.5, step=0.1), 10) == (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
    assert last_value(Uniform(0.0, 1.0, step=0.3)) == 0.9
    assert values_of(Int(1, 8, step=3), 10) == (1, 4, 7)


def test_values_of_gives_up_on_what_is_continuous_or_too_long():
    assert values_of(Uniform(0.0, 1.0), 10) is None
    assert values_of(Int(0, 10**15), 1000) is None
    assert values_of(Choice((0, Int(0, 2))), 10) == (0, 1, 2)
    assert values_of(Choice((0, Uniform(0.1, 1.0))), 10) is None


def test_equal_numbers_are_one_value_and_true_is_not_one():
    assert distinct([1, 1.0, True, "1", [1], [1.0]]) == (1, True, "1", [1])


def test_a_grid_is_not_sampled():
    with pytest.raises(TypeError):
        sample(Grid((1, 2)), random.Random(0))
