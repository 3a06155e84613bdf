"""A bounded influence: what exceeds the others' median many times over is shortened to that bound.

A client that lies within the bounds still counts, as one of its cohort. The median is that of the
*others*, so nobody moves the bound for himself. Below three replies there is no majority to measure
by, and nothing is clipped; neither where more than half of the others have not moved at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, number
from .wire import COUNTS, Arrays

LEAST = 3  # replies


class Clip(NamedTuple):
    """How many times the others' median a reply may have: the length of its update, and its weight."""

    update: float = 20.0
    weight: float = 50.0

    def multiple(self, kind: str) -> float:
        """The bound of one kind of arrays; counts grow with the rows, as weights do."""
        return self.weight if kind == COUNTS else self.update


def checked(clip: Clip | None) -> Clip | None:
    """The user's bounds; None where nothing shall be clipped."""
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
    """What each size is multiplied by, 1 or less, so that none exceeds so many times the others'
    median."""
    if len(sizes) < LEAST:
        return [1.0] * len(sizes)
    bounds = [multiple * other for other in medians(sizes)]
    return [
        bound / size if 0 < bound < size else 1.0 for size, bound in zip(sizes, bounds, strict=True)
    ]


def medians(values: Sequence[float]) -> list[float]:
    """For each value the median of the others, the upper of two; infinite where there is no other."""
    order = np.argsort(values, kind="stable")
    middle = (len(values) - 1) // 2
    out = [inf] * len(values)
    if len(values) > 1:
        for place, i in enumerate(order.tolist()):
            out[i] = values[order[middle if middle < place else middle + 1]]
    return out


def moves(
    arrays: Mapping[str, NDArray[Any]], sent: Mapping[str, NDArray[Any]], kinds: Mapping[str, str]
) -> list[float]:
    """How far the arrays of each kind are from those that were sent, in the order of `kinds`."""
    totals = dict.fromkeys(kinds.values(), 0.0)
    for name, kind in kinds.items():
        away = (arrays[name].astype(np.float64) - sent[name]).ravel()
        totals[kind] += float(np.vdot(away, away))
    return [sqrt(total) for total in totals.values()]


def shortened(
    arrays: Mapping[str, NDArray[Any]],
    sent: Mapping[str, NDArray[Any]],
    kinds: Mapping[str, str],
    scales: Mapping[str, float],
) -> Arrays:
    """The arrays drawn back towards those that were sent, each kind by its factor."""
    return {name: _drawn(value, sent[name], scales[kinds[name]]) for name, value in arrays.items()}


def _drawn(value: NDArray[Any], sent: NDArray[Any], scale: float) -> NDArray[Any]:
    if scale == 1:
        return value
    near = sent + scale * (value.astype(np.float64) - sent)
    return np.asarray(np.rint(near) if value.dtype.kind in "iu" else near, value.dtype)


def told(what: str, size: float, scale: float) -> str:
    """What was clipped, for the log."""
    return f"its {what} {size:.3g} counts as {size * scale:.3g}"
