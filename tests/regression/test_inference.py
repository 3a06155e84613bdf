"""Distributions against scipy, and what the information tells."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import special, stats

from fedsso.errors import InputError
from fedsso.regression.design import Term
from fedsso.regression.inference import (
    dependent,
    incomplete_beta,
    invert,
    involved,
    quantile,
    sandwich,
    two_sided,
)

DEGREES = (1, 2, 3, 7.5, 30, 400, 20_000, math.inf)


@pytest.mark.parametrize("df", DEGREES)
@pytest.mark.parametrize("value", [0.0, 0.01, 0.7, -1.96, 4.0, 30.0])
def test_p_values_are_those_of_scipy(df: float, value: float) -> None:
    """log Gamma(df / 2), up to 1e5 in size, is rounded: eps 1e5 is 2e-11."""
    right = 2 * stats.t.sf(abs(value), df)
    assert two_sided(value, df) == pytest.approx(right, rel=1e-10, abs=1e-300)


@pytest.mark.parametrize("df", DEGREES)
@pytest.mark.parametrize("share", [0.6, 0.95, 0.975, 0.9995])
def test_quantiles_are_those_of_scipy(df: float, share: float) -> None:
    assert quantile(share, df) == pytest.approx(stats.t.ppf(share, df), rel=1e-9)


def test_the_incomplete_beta_function_is_that_of_scipy() -> None:
    rng = np.random.default_rng(0)
    for a, b, x in zip(*rng.uniform((0.2, 0.2, 0), (40, 40, 1), (200, 3)).T, strict=True):
        right = special.betainc(a, b, x)
        assert incomplete_beta(a, b, x) == pytest.approx(right, rel=1e-10, abs=1e-14)
    assert incomplete_beta(2, 3, 0.0) == 0
    assert incomplete_beta(2, 3, 1.0) == 1


def test_no_degrees_of_freedom_give_no_number() -> None:
    assert math.isnan(two_sided(1.0, 0))
    assert math.isnan(quantile(0.975, 0))
    assert math.isnan(two_sided(math.nan))


def test_the_inverse_holds_for_columns_of_any_size() -> None:
    """Scaled to unit diagonal, the condition is 3: the residual is within 100 eps."""
    size = np.array([1e-6, 1.0, 1e6])
    correlations = np.array([[1, 0.5, 0.2], [0.5, 1, 0.1], [0.2, 0.1, 1]])
    H = correlations * np.outer(size, size)
    inverse = invert(H)
    np.testing.assert_allclose(
        (inverse * np.outer(size, size)) @ correlations, np.eye(3), atol=1e-14
    )
    assert np.array_equal(inverse, inverse.T)


def test_the_sandwich_by_hand() -> None:
    """H = 2 and gradients 1, -1 of two hospitals: 2 / (2 - 1) * (1 + 1) / 4 = 1."""
    parts = np.array([[1.0], [-1.0]])
    assert sandwich(np.array([[2.0]]), parts) == pytest.approx(np.array([[1.0]]))


def test_a_dependence_is_found_whatever_the_units() -> None:
    """The third column is the sum of the first two, each in a unit of its own."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(50, 4))
    x[:, 2] = x[:, 0] + x[:, 1]
    scaled = x * np.array([1e-4, 1.0, 1e5, 1.0])
    direction = dependent(scaled.T @ scaled)
    assert direction is not None
    terms = [Term(name, name) for name in "abcd"]
    assert involved(terms, direction) == ["a", "b", "c"]
    kept = [0, 1, 3]
    assert dependent((scaled.T @ scaled)[np.ix_(kept, kept)]) is None


def test_a_level_between_0_and_1() -> None:
    from test_fit import usual

    from fedsso.regression.inference import coefficients

    for level in (0, 1, 95):
        with pytest.raises(InputError, match="level must be between 0 and 1"):
            coefficients(usual(), level)
    with pytest.raises(InputError, match="cluster=True"):
        coefficients(usual(), robust=True)
