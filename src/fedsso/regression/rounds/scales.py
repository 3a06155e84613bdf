"""The scales of a regression's coefficients, and the linear maps between them.

table     the units of the tables, in which results are shown
common    (x - mean) / deviation of the federation: what hospitals are asked about; b
own       the server's: the information that it was last told is the identity; u
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..design import Term
from ..questions import Answer, Array

CONSTANT = 1e-12
"""A column whose deviation is a smaller share of its mean is constant."""
Mask: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]


class Moments(NamedTuple):
    """Of each column of the design, over all hospitals, [p]."""

    mean: Array
    deviation: Array

    @property
    def constant(self) -> Mask:
        """Which columns are the same in all rows, but for rounding, [p]."""
        same: Mask = self.deviation <= CONSTANT * np.abs(self.mean)
        return same


def moments(answers: list[Answer]) -> Moments:
    """Mean and standard deviation of each column, from the sums of every hospital."""
    weight = np.array([answer.arrays["weight"][0] for answer in answers])
    means = np.stack([answer.arrays["mean"] for answer in answers])
    spreads = np.stack([answer.arrays["spread"] for answer in answers])
    mean = weight @ means / weight.sum()
    between = weight @ (means - mean) ** 2
    return Moments(mean, np.sqrt((spreads.sum(0) + between) / weight.sum()))


def common_scale(
    terms: tuple[Term, ...],
    held: Moments,
    centred: bool,
) -> Moments:
    """What the hospitals subtract and divide by: 0 and 1 of an intercept and of levels.

    Of a number that is not to be scaled the mean is subtracted all the same, against cancellation.
    Without an intercept nothing is subtracted (centred=False), since that would change the model.
    """
    scaled = np.array([term.scaled for term in terms]) & ~held.constant
    number = np.array([bool(term.column) and not term.level for term in terms])
    mean = np.where(number & centred, held.mean, 0.0)
    return Moments(mean, np.where(scaled, held.deviation, 1.0))


def to_table(
    terms: tuple[Term, ...],
    common: Moments,
) -> Array:
    """The map [p, p] from coefficients on the common scale to those in the units of the tables."""
    change = np.diag(1 / common.deviation)
    if has_intercept(terms):
        change[0] -= common.mean / common.deviation
    return change


def centring(
    terms: tuple[Term, ...],
    held: Moments,
    common: Moments,
) -> Array:
    """The map [p, p] to the common scale from one on which the columns have a mean of 0.

    Without an intercept nothing can be centred: the identity.
    """
    change = np.eye(len(terms))
    if has_intercept(terms):
        centre = (held.mean - common.mean) / common.deviation
        change[0, 1:] = -centre[1:]
    return change


def has_intercept(terms: tuple[Term, ...]) -> bool:
    """Whether the first term is the intercept."""
    return bool(terms) and not terms[0].column
