"""Means and spreads of what runs end with, held against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from orchestrator.reports.statistics import mean_and_spread


def test_mean_and_spread_are_numpys_of_the_finite_values() -> None:
    values = [0.25, -3.5, 1e-9, 7e5]
    mean, spread = mean_and_spread([*values, math.nan, math.inf, None])
    assert mean == pytest.approx(np.mean(values), rel=1e-15)  # both round once or twice
    assert spread == pytest.approx(np.std(values, ddof=1), rel=1e-15)
    assert mean_and_spread([2.0, None]) == (2.0, None)
    assert mean_and_spread([math.nan]) == (None, None)


def test_what_no_float_holds_is_no_number_instead_of_an_error() -> None:
    assert mean_and_spread([1.7e308, 1.7e308]) == (None, 0.0)
    assert mean_and_spread([1.7e308, -1.7e308]) == (0.0, None)
