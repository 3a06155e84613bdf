"""The scales of a regression's coefficients, and the linear maps between them.

table     the units of the tables, in which results are shown
common    (x - mean) / deviation of the federation: what hospitals are asked about; b
own       the server's: the information that it was last told is the identity; u
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..design import Term
from ..questions import Answer, Array

CONSTANT = 1e-12
"""A column whose deviation is a smaller share of its mean is constant."""
FAR = 4.0
"""A column is far if its mean is so many deviations away, or its deviation so many times theirs."""
SOME = 10
"""A hospital of fewer rows may be far from others by chance."""
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


def unlike(terms: tuple[Term, ...], answers: list[Answer]) -> Iterator[str]:
    """Sentences about columns that are far from those of all others in one hospital."""
    answers = [answer for answer in answers if answer.arrays["rows"][0] >= SOME]
    if len(answers) < 2:
        return
    weight = np.array([answer.arrays["weight"] for answer in answers])
    mean = np.array([answer.arrays["mean"] for answer in answers])
    square = np.array([answer.arrays["spread"] for answer in answers]) / weight
    codes = np.isclose(square, mean * (1 - mean), rtol=1e-6, atol=0.0).all(0)  # 0 and 1 alone
    for column, term in enumerate(terms):
        if term.level or not term.column or codes[column]:
            continue
        m = mean[:, column]
        s = np.sqrt(square[:, column])
        far = max(_far(m, s, place) for place in range(len(answers)))
        if far.times > FAR:
            yield (
                f"{term.name} in {answers[far.place].hospital} (mean {m[far.place]:.3g}, "
                f"deviation {s[far.place]:.3g}) is far from the other hospitals (mean "
                f"{far.mean:.3g}, deviation {far.deviation:.3g}): compare its unit, and its codes "
                "of missing values."
            )


class Far(NamedTuple):
    """How far a column of one hospital is from those of others, and what is usual there."""

    times: float
    place: int
    mean: float
    deviation: float


def _far(mean: Array, deviation: Array, place: int) -> Far:
    """The hospital at this place beside the medians of all others."""
    usual = float(np.median(np.delete(mean, place)))
    size = float(np.median(np.delete(deviation, place)))
    own = float(deviation[place])
    if not size > 0:
        return Far(0.0, place, usual, size)
    times = max(abs(float(mean[place]) - usual), own) / size
    if own > 0 and 2 * abs(mean[place]) < abs(usual):  # all is smaller: perhaps a larger unit
        times = max(times, size / own)
    return Far(times, place, usual, size)


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
