"""What a model's buffers can be: a variance is not negative, a count does not jump."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MOST

MEAN, VARIANCE, COUNT = "*running_mean", "*running_var", "*num_batches_tracked"
FARTHEST = 1e15  # a mean beyond this is none of data; a variance, beyond its square


def fault(name: str, value: NDArray[Any], sent: NDArray[Any]) -> str:
    """Why these cannot be the buffers of that name after a round that began with `sent`; empty if
    they can."""
    if not value.size:
        return ""
    if fnmatchcase(name, VARIANCE):
        return _outside(name, value, 0.0, FARTHEST**2, "a variance")
    if fnmatchcase(name, MEAN):
        return _outside(name, value, -FARTHEST, FARTHEST, "a mean")
    if fnmatchcase(name, COUNT):
        return _outside(name, value, 0.0, float(sent.max()) + MOST, "a count")
    if sent.dtype.kind in "iu":
        moved = float(np.abs(value.astype(np.float64) - sent.astype(np.float64)).max())
        return (
            f"{name} has moved by {moved:.3g}, more than {MOST:.0e} cannot be"
            if moved > MOST
            else ""
        )
    return ""


def _outside(name: str, value: NDArray[Any], least: float, most: float, kind: str) -> str:
    low, high = float(value.min()), float(value.max())
    if least <= low and high <= most:
        return ""
    return (
        f"{name} holds {low if low < least else high:.3g}, {kind} lies in [{least:g}, {most:.3g}]"
    )
