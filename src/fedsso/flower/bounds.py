"""Bounds on the influence of one client.

If the update or the weight of a client is many times the others' median, it is shortened to that
bound. A client that lies within the bounds still counts, but only as one of many.

The median is that of the *other* clients, so nobody can move the bound for itself. Nothing is
clipped with fewer than three replies, because then there is no majority to measure by. Nothing is
clipped either where more than half of the others have not moved at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, sqrt
from typing import NamedTuple

import numpy as np

from ..errors import InputError, number
from .wire import COUNTS, Arrays, Given, Values

LEAST = 3
"""The fewest replies of which one can be clipped."""


class Clip(NamedTuple):
    """How many times the others' median a reply may have.

    `update` bounds the length of an update, `weight` bounds the weight.

    >>> Clip(update=10)
    Clip(update=10, weight=50.0)
    """

    update: float = 20.0
    weight: float = 50.0

    def multiple(self, kind: str) -> float:
        """The bound of one kind of arrays. Counts grow with the rows, as weights do."""
        if kind == COUNTS:
            return self.weight
        return self.update


def checked(clip: Clip | None) -> Clip | None:
    """Check the bounds that a user gives. None means that nothing is clipped."""
    if clip is None:
        return None
    if not isinstance(clip, tuple) or len(clip) != 2:
        raise InputError(
            f"clip must be fedsso.flower.Clip(update=20, weight=50), or None for none; got {clip!r}"
        )
    for name, value in zip(Clip._fields, clip, strict=True):
        if not number(f"clip's {name}", value) >= 1:
            raise InputError(
                f"clip's {name} must be >= 1, a multiple of the others' median, got {value}"
            )
    return Clip(*map(float, clip))


def factors(sizes: Sequence[float], multiple: float) -> list[float]:
    """What to multiply each size by, so that none exceeds `multiple` times the others' median.

    >>> factors([1.0, 1.0, 1.0, 40.0], multiple=20)
    [1.0, 1.0, 1.0, 0.5]
    """
    found = [1.0] * len(sizes)
    if len(sizes) < LEAST:
        return found
    for place, other in enumerate(medians(sizes)):
        bound = multiple * other
        size = sizes[place]
        if 0 < bound < size:
            found[place] = bound / size
    return found


def medians(values: Sequence[float]) -> list[float]:
    """For each value, the median of the others. It is infinite where there is no other.

    Of an even number of others, it is the upper of the two in the middle.

    >>> medians([3.0, 1.0, 2.0])
    [2.0, 3.0, 3.0]
    """
    found = [inf] * len(values)
    if len(values) < 2:
        return found
    order = np.argsort(values, kind="stable").tolist()
    middle = (len(values) - 1) // 2
    for place, i in enumerate(order):
        # Without the value itself, those behind it move up by one place.
        others_middle = middle
        if middle >= place:
            others_middle += 1
        found[i] = values[order[others_middle]]
    return found


def moves(
    arrays: Given,
    sent: Given,
    kinds: Mapping[str, str],
) -> list[float]:
    """How far the arrays of each kind are from those that were sent.

    `kinds` maps the name of an array to its kind. The distances come in the order in which the
    kinds first appear.
    """
    totals = dict.fromkeys(kinds.values(), 0.0)
    for name, kind in kinds.items():
        wide = arrays[name].astype(np.float64)
        away = (wide - sent[name]).ravel()
        square = np.vdot(away, away)
        totals[kind] += float(square)
    return [sqrt(total) for total in totals.values()]


def shortened(
    arrays: Given,
    sent: Given,
    kinds: Mapping[str, str],
    scales: Mapping[str, float],
) -> Arrays:
    """Draw the arrays back towards those that were sent. `scales` has the factor of each kind."""
    near = {}
    for name, value in arrays.items():
        scale = scales[kinds[name]]
        near[name] = _drawn_back(value, sent[name], scale)
    return near


def _drawn_back(value: Values, sent: Values, scale: float) -> Values:
    """An array between what was sent (scale 0) and what came back (scale 1), in the same type."""
    if scale == 1:
        return value
    away = value.astype(np.float64) - sent
    near = sent + scale * away
    if value.dtype.kind in "iu":
        near = np.rint(near)
    return np.asarray(near, value.dtype)


def told(what: str, size: float, scale: float) -> str:
    """What was clipped, for the log."""
    counts_as = size * scale
    return f"its {what} {size:.3g} counts as {counts_as:.3g}"
