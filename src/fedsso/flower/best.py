"""What evaluation tells: the best model so far, and whether the newest is worse than those before.

The loss of the model after a round is known before the next round. It is the server's evaluation,
where that reports a loss, or else the clients'.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf, isfinite
from typing import NamedTuple, Self

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from ..algorithms.cautious import NOTICED, WINDOW
from .wire import arrays_of

# Names of tensors in a checkpoint.
PREFIX = "best."
LOWEST = f"{PREFIX}lowest"
RECENT = f"{PREFIX}recent"
ARRAY = f"{PREFIX}array."


class Best(NamedTuple):
    """The best model so far, as far as evaluation tells.

    >>> best = Best().after(0.5, ArrayRecord()).after(0.4, ArrayRecord()).after(0.6, ArrayRecord())
    >>> best.lowest, best.worse
    (0.4, True)
    """

    arrays: ArrayRecord | None = None
    """The model with the lowest loss. None before the first loss."""
    lowest: float = inf
    """Its loss."""
    recent: tuple[float, ...] = ()
    """The losses that the next one is compared with, newest last."""
    worse: bool = False
    """Whether the newest is higher than all of these, by as much as the cautious guard notices."""

    def after(self, loss: float | None, arrays: ArrayRecord) -> Self:
        """The same after a newer model, whose loss is None if it was not evaluated."""
        if loss is None:
            return self._replace(worse=False)
        if not isfinite(loss):
            return self._replace(worse=True)
        highest = max(self.recent, default=inf)
        worse = loss > highest + NOTICED * abs(highest)
        newer = self._replace(recent=(*self.recent, loss)[-WINDOW:], worse=worse)
        return newer._replace(arrays=arrays, lowest=loss) if loss < self.lowest else newer

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a later process needs to go on, by name. Empty before the first loss."""
        if self.arrays is None:
            return {}
        found = {
            LOWEST: torch.tensor(self.lowest, dtype=torch.float64),
            RECENT: torch.tensor(self.recent, dtype=torch.float64),
        }
        for name, array in arrays_of(self.arrays).items():
            found[f"{ARRAY}{name}"] = torch.from_numpy(np.array(array))
        return found

    @classmethod
    def of(cls, names: Iterable[str], tensors: Mapping[str, Tensor]) -> Self:
        """What `tensors` was made of, for a model whose arrays have these names."""
        if LOWEST not in tensors:
            return cls()
        arrays = {name: Array(tensors[f"{ARRAY}{name}"].numpy()) for name in names}
        recent = tuple(tensors[RECENT].tolist())
        return cls(ArrayRecord(arrays), float(tensors[LOWEST]), recent)
