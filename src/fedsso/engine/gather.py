"""Mini-batches for a chunk of clients, gathered into buffers that are used again and again.

Rows stay uint8 until they are gathered: widening a batch is cheaper than reading four times the bytes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..algorithm import Batch
from ..data import Federation
from ..rng import key
from .rounds import Ints, Rounds


class Gather:
    """Rows of a federation as floating-point batches, in buffers that it owns."""

    def __init__(self, fed: Federation, dtype: torch.dtype) -> None:
        self.fed, self.dtype = fed, dtype
        self.flat = fed.x.flatten(1)
        self.y = fed.y if fed.classes else fed.y.to(dtype)
        self._shift = fed.x.new_full((), fed.affine[1], dtype=dtype)
        self._raw = fed.x.new_empty(0)
        self._wide = fed.x.new_empty(0, dtype=dtype)

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """x [*rows, *sample] and y [*rows]; x is overwritten by the next call."""
        n, width = rows.numel(), self.flat.shape[1]
        if self._wide.shape[0] < n:
            self._raw = self.flat.new_empty(n, width)
            self._wide = self.flat.new_empty(n, width, dtype=self.dtype)
        wide = self._wide[:n]
        index = rows.reshape(-1)
        if self.flat.dtype == self.dtype:
            torch.index_select(self.flat, 0, index, out=wide)
        else:
            torch.index_select(self.flat, 0, index, out=self._raw[:n])
            wide.copy_(self._raw[:n])
        scale = self.fed.affine[0]
        if self.fed.affine != (1.0, 0.0):
            torch.add(self._shift, wide, alpha=scale, out=wide)  # scale and shift in one pass
        return wide.view(*rows.shape, *self.fed.x.shape[1:]), self.y.index_select(0, index).view(rows.shape)


class Chunk:
    """What a few clients hold in one round (the `Local` of client functions)."""

    def __init__(self, gather: Gather, rounds: Rounds, k: int, clients: Ints, position: Ints, steps: Ints) -> None:
        self.k = k
        self.steps = int(steps.max())
        self._gather, self._loaded = gather, -1
        self._seed = key(rounds.protocol.seed, "module", int(clients[0]), int(position[0]))
        self._same = rounds.constant(clients)
        device = gather.fed.x.device
        rows, weight = _index(rounds, clients, position, 1 if self._same else self.steps)
        self._rows = torch.from_numpy(rows).to(device)
        self._weight = torch.from_numpy(weight).to(device, gather.dtype)
        self.own_steps = torch.from_numpy(steps).to(device, gather.dtype).view(-1, 1, 1)
        self._ragged = bool((steps != self.steps).any())

    def batch(self, j: int) -> Batch:
        """The mini-batch of local step j; clients with one batch per epoch see it again without a new gather."""
        at = 0 if self._same else j
        if self._loaded != at:
            self._x, self._y = self._gather(self._rows[at])
            self._loaded = at
        return Batch(self._x, self._y, self._weight[at], self._seed + j)

    def active(self, j: int) -> Tensor | None:
        """Who takes step j; None: everybody."""
        return (self.own_steps > j).to(self._weight.dtype) if self._ragged else None


def _index(
    rounds: Rounds, clients: Ints, position: Ints, steps: int
) -> tuple[Ints, np.ndarray[tuple[int, ...], np.dtype[np.float64]]]:
    """Row indices and weights [steps, clients, width]; short batches repeat a row with weight 0."""
    width = int(rounds.width[clients].max())
    rows = np.empty((steps, len(clients), width), np.int64)
    weight = np.zeros((steps, len(clients), width))
    for m, (client, start) in enumerate(zip(clients.tolist(), position.tolist(), strict=True)):
        j = 0
        while j < steps:
            block = rounds.batches(client, start + j, steps - j)
            n, w = block.shape
            rows[j : j + n, m, :w] = block
            rows[j : j + n, m, w:] = block[:, :1]
            weight[j : j + n, m, :w] = 1 / w
            j += n
    return rows, weight
