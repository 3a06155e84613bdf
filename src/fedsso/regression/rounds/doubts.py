"""Which hospital cannot be right, though each of its answers looks like one.

Log-likelihoods are concave and add up, so that rows of one more hospital never make a maximum
disappear. Two kinds of numbers break this: those beside which all others vanish in float64, and
those that belong to no concave function at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from ..questions import Answer, Array
from .scales import Moments, moments

T = TypeVar("T")
LOST = 1e-10
"""What is a smaller share of a sum says nothing in float64 any more."""
ROUNDING = 1e-13
"""The share of a sum that may be lost in adding it up."""
CLEAR = 100.0
"""Who is so many times as far off as the next is the one."""
WIDE = 1e4
"""A column whose deviation in one hospital is so many times that of all others drowns them."""


class Said(NamedTuple):
    """What the m hospitals said of one model."""

    b: Array
    loglik: Array
    """[m]"""
    gradient: Array
    """[m, p]"""


class Far(NamedTuple):
    """A hospital, and a column that looks constant in all others beside it."""

    place: int
    column: int


def without(hospitals: Sequence[T]) -> list[list[T]]:
    """All hospitals but one, for each of them; none where there is but one."""
    found = []
    for one in range(len(hospitals)):
        rest = [*hospitals[:one], *hospitals[one + 1 :]]
        if rest:
            found.append(rest)
    return found


def outweighing(sizes: Array) -> int | None:
    """The hospital beside which the sum of all others [m] would be lost in float64, if any."""
    for place, rest in enumerate(without(sizes.tolist())):
        if LOST * sizes[place] > sum(rest) > 0:
            return place
    return None


def off_scale(answers: list[Answer]) -> Far | None:
    """The hospital with a column so wide, or so far away, that those of others do not count."""
    whole = moments(answers)
    for place, rest in enumerate(without(answers)):
        others = moments(rest)
        wide = ~others.constant & (whole.deviation > WIDE * others.deviation)
        if wide.any():
            return Far(place, int(wide.argmax()))
    return None


def information_per_row(answers: list[Answer], scale: Moments, diagonals: Array) -> Array:
    """The most that each hospital knows of a column, as a share of its sum of squares, [m].

    It is about the variance of the outcome, whatever the column.
    """
    weight = np.array([answer.arrays["weight"] for answer in answers])
    mean = np.array([answer.arrays["mean"] for answer in answers])
    spread = np.array([answer.arrays["spread"] for answer in answers])
    squares = (spread + weight * (mean - scale.mean) ** 2) / scale.deviation**2
    shares = np.divide(diagonals, squares, out=np.zeros_like(squares), where=squares > 0)
    return np.asarray(shares.max(1))


def contradiction(now: Said, before: Iterable[Said], outcome: Array) -> Array:
    """How far the numbers of each hospital are from those of a concave function, [m].

    Such a function lies below its tangents. The distance is a share of the numbers themselves, and
    of the sizes of the outcomes [m].
    """
    worst = np.zeros(len(outcome))
    for then in before:
        d = now.b - then.b
        with np.errstate(over="ignore", invalid="ignore"):
            ahead = then.gradient @ d
            behind = now.gradient @ d
            rise = now.loglik - then.loglik
            size = np.abs([now.loglik, then.loglik, ahead, behind, outcome]).sum(0)
            beyond = np.maximum(rise - ahead, behind - rise) / size
        worst = np.fmax(worst, beyond)  # which passes over NaN
    return worst


def foremost(worst: Array) -> int | None:
    """The hospital that is far beyond rounding and beyond all others, if any."""
    place = int(worst.argmax())
    others = np.delete(worst, place).max(initial=0.0)
    if len(worst) > 1 and worst[place] > max(ROUNDING, CLEAR * others):
        return place
    return None
