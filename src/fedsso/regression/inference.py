"""From the information of all hospitals to standard errors, tests and intervals.

=========  =========================================================================================
H          the information of all hospitals at the estimate, [p, p]
V          the covariance, phi H^-1
phi        the dispersion: of a gaussian model the residual variance, else 1
g_i        the gradient of hospital i at the estimate; over all hospitals they sum up to 0
z, t       estimate / standard error: t with n - p degrees of freedom for a gaussian model, and with
           m - 1 where errors are clustered by m hospitals, else z
=========  =========================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from ..errors import InputError
from .design import Term
from .questions import Array
from .records import Fit

COLLINEAR = 1e-10
"""The least eigenvalue that a matrix of correlations may have in float64."""
NAMED = 0.1
"""A column is named in a message if it has this share of the largest part in a direction."""
FRACTION_STEPS = 500
"""Of the continued fraction at most."""
FRACTION_END = 1e-15
"""It ends where a step changes its value by a smaller share."""


class Coefficient(NamedTuple):
    """One line of a table of coefficients."""

    term: Term
    estimate: float
    std_error: float
    statistic: float
    """z or t."""
    p: float
    low: float
    high: float


def coefficients(
    fit: Fit,
    level: float = 0.95,
    *,
    robust: bool = False,
) -> tuple[Coefficient, ...]:
    """The table of coefficients, with intervals of this level.

    `robust` takes the errors clustered by hospital, which the fit must have been asked for.
    """
    if not 0 < level < 1:
        raise InputError(f"level must be between 0 and 1, such as 0.95, got level={level!r}")
    covariance = fit.robust if robust else fit.covariance
    if covariance is None:
        raise InputError("the fit has no errors clustered by hospital; fit with cluster=True")
    df = degrees(fit, robust=robust)
    reach = quantile(0.5 + level / 2, df)
    errors = np.sqrt(covariance.diagonal())
    lines = []
    for term, estimate, error in zip(
        fit.terms, fit.coefficients.tolist(), errors.tolist(), strict=True
    ):
        statistic = estimate / error if error > 0 else math.nan
        low = estimate - reach * error
        high = estimate + reach * error
        p = two_sided(statistic, df)
        lines.append(Coefficient(term, estimate, error, statistic, p, low, high))
    return tuple(lines)


def degrees(fit: Fit, *, robust: bool) -> float:
    """The degrees of freedom of the tests: infinite where they are normal."""
    if robust:
        return float(len(fit.hospitals) - 1)
    return float(fit.residual_df) if fit.family == "gaussian" else math.inf


# ---- covariance ----


def invert(H: Array) -> Array:
    """The inverse of a positive definite matrix, scaled to unit diagonal on the way."""
    size = np.sqrt(H.diagonal())
    inverse = np.linalg.inv(H / np.outer(size, size))
    whole: Array = (inverse + inverse.T) / 2 / np.outer(size, size)
    return whole


def sandwich(H: Array, parts: Array) -> Array:
    """The covariance clustered by hospital, from the gradients g_i [hospitals, p].

    It is m / (m - 1) H^-1 (sum of g_i g_i^T) H^-1, with m hospitals.
    """
    m = len(parts)
    bread = invert(H)
    rows = (parts - parts.mean(0)) @ bread
    covariance: Array = m / (m - 1) * rows.T @ rows
    return covariance


def dependent(H: Array, margin: float = 1.0) -> Array | None:
    """The combination [p] of columns that the information knows nothing of, if there is one.

    H [p, p] must have centred columns where there is an intercept. The combination is in units of
    each column's own standard error, so that its parts can be compared. It is one, too, if the
    information is less than `margin` times what it needs.
    """
    size = np.sqrt(np.maximum(H.diagonal(), 0.0))
    if not (size > 0).all():
        return np.where(size > 0, 0.0, 1.0)
    values, vectors = np.linalg.eigh(H / np.outer(size, size))
    if values[0] > margin * COLLINEAR:
        return None
    direction: Array = vectors[:, 0]
    return direction


def involved(terms: Sequence[Term], direction: Array) -> list[str]:
    """The names of the terms that have a part in a direction [p]."""
    parts = np.abs(direction)
    return [
        term.name
        for term, part in zip(terms, parts.tolist(), strict=True)
        if part >= NAMED * parts.max()
    ]


# ---- distributions ----


def two_sided(statistic: float, df: float = math.inf) -> float:
    """The probability of a value at least as far from 0, of the normal or the t distribution.

    >>> round(two_sided(1.959963984540054), 12)
    0.05
    """
    if math.isnan(statistic):
        return math.nan
    if math.isinf(df):
        return math.erfc(abs(statistic) / math.sqrt(2))
    if df <= 0:
        return math.nan
    return incomplete_beta(df / 2, 0.5, df / (df + statistic**2))


def quantile(share: float, df: float = math.inf) -> float:
    """The value below which this share (above 1/2) of the normal or the t distribution lies.

    >>> round(quantile(0.975, 10), 4)
    2.2281
    """
    if math.isinf(df):
        return NormalDist().inv_cdf(share)
    if df <= 0:
        return math.nan
    outside = 2 * (1 - share)
    low = 0.0
    high = 1.0
    while two_sided(high, df) > outside:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if two_sided(middle, df) > outside:
            low = middle
        else:
            high = middle
    return high


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction.

    >>> incomplete_beta(1.0, 1.0, 0.25)
    0.25
    """
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1 - incomplete_beta(b, a, 1 - x)
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(scale + a * math.log(x) + b * math.log1p(-x)) / a
    return front * _fraction(a, b, x)


def _fraction(a: float, b: float, x: float) -> float:
    """1 / (1 + d_1 / (1 + d_2 / (1 + ...))), by the method of Lentz."""
    value = 1.0
    upper = 1.0
    lower = 0.0
    for k in range(1, FRACTION_STEPS):
        m = k // 2
        if k % 2:
            d = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        lower = 1 / (1 + d * lower)
        upper = 1 + d / upper
        value *= upper * lower
        if abs(upper * lower - 1) < FRACTION_END:
            break
    return 1 / value
