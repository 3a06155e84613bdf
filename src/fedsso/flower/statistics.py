"""What the buffers of a model can be: a variance is not negative, and a count does not jump.

BatchNorm keeps running statistics of the data in buffers. Clients send them back, and a client that
sends nonsense could spoil the model of everybody.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import numpy as np

from ..errors import MOST
from .wire import Values

# The names of BatchNorm's buffers.
MEAN = "*running_mean"
VARIANCE = "*running_var"
COUNT = "*num_batches_tracked"

FARTHEST = 1e15
"""No data have a mean beyond this, or a variance beyond its square."""


def fault(name: str, value: Values, sent: Values) -> str:
    """Why an array cannot be the buffer of that name. Empty if it can.

    Args:
        name: The name of the buffer in the model, by which its kind is known.
        value: What the client has sent back.
        sent: The buffer at the beginning of the round.

    >>> fault("bn.running_var", np.array([-1.0]), np.array([1.0]))
    'bn.running_var holds -1, a variance lies in [0, 1e+30]'
    """
    if not value.size:
        return ""
    if fnmatchcase(name, VARIANCE):
        return _outside(name, value, 0.0, FARTHEST**2, "a variance")
    if fnmatchcase(name, MEAN):
        return _outside(name, value, -FARTHEST, FARTHEST, "a mean")
    if fnmatchcase(name, COUNT):
        most = float(sent.max()) + MOST
        return _outside(name, value, 0.0, most, "a count")
    if sent.dtype.kind not in "iu":
        return ""
    away = value.astype(np.float64) - sent.astype(np.float64)
    moved = float(np.abs(away).max())
    if moved > MOST:
        return f"{name} has moved by {moved:.3g}, more than {MOST:.0e} cannot be"
    return ""


def _outside(
    name: str,
    value: Values,
    least: float,
    most: float,
    kind: str,
) -> str:
    """Why the numbers do not lie between `least` and `most`. Empty if they do."""
    low = float(value.min())
    high = float(value.max())
    if least <= low and high <= most:
        return ""
    wrong = low if low < least else high
    return f"{name} holds {wrong:.3g}, {kind} lies in [{least:g}, {most:.3g}]"
