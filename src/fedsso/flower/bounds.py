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

    Give it to a strategy as `clip`. What exceeds a bound is reduced to the bound, and the client
    still takes part. Both numbers must be at least 1.

    Args:
        update: Bounds the length of an update, the Euclidean distance from the model that was sent.
        weight: Bounds the weight, usually a client's number of rows. With the default, a client
            that has 50 times the rows of the others still counts fully.

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
    """Check the bounds that a user gives, and return them as floats.

    None means that nothing is clipped. Raises InputError for anything but a pair of numbers >= 1: a
    multiple below 1 would clip typical clients.
    """
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

    Args:
        sizes: A length or a weight of each client, not negative.
        multiple: The bound, in units of the others' median.

    Returns:
        A factor in (0, 1] for each client. It is 1 for all of fewer than three clients, and where
        the others' median is 0.

    >>> factors([1.0, 1.0, 1.0, 40.0], multiple=20)
    [1.0, 1.0, 1.0, 0.5]
    """
    found = [1.0] * len(sizes)
    if len(sizes) < LEAST:
        return found
    for place, other in enumerate(medians(sizes)):
        bound = multiple * other
        size = sizes[place]
        # A median of 0 is no scale to measure by: it would erase whoever has moved.
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
    # One sort serves all of them, instead of one sort for each value.
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

    Args:
        arrays: What a client has sent back, by name.
        sent: What it was sent, by the same names.
        kinds: The kind of each array, by name.

    Returns:
        A Euclidean distance for each kind, in the order in which the kinds first appear. It is
        computed in float64, because a sum of squares in float32 overflows much earlier.
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
    """Draw the arrays back towards those that were sent.

    `scales` has the factor of each kind. The direction of an update stays the same within a kind,
    only its length changes. The arguments are not modified.
    """
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
    # A conversion to an integer type would cut fractions off, so counts would be biased to zero.
    if value.dtype.kind in "iu":
        near = np.rint(near)
    return np.asarray(near, value.dtype)


def told(what: str, size: float, scale: float) -> str:
    """What was clipped, for the log.

    >>> told("weight", 1000.0, 0.5)
    'its weight 1e+03 counts as 500'
    """
    counts_as = size * scale
    return f"its {what} {size:.3g} counts as {counts_as:.3g}"
