"""Mini-batches for a chunk of clients, gathered into buffers that are used again and again.

Rows stay uint8 until they are gathered: widening a batch is cheaper than reading four times the
bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..algorithm import Batch
from ..support.rng import key

if TYPE_CHECKING:
    from ..data import Federation
    from .rounds import Ints, Rounds

Floats = NDArray[np.float64]
BUDGET = {"cpu": 24 << 20, "cuda": 8 << 30}  # bytes of a chunk of clients


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
        return wide.view(*rows.shape, *self.fed.x.shape[1:]), self.y.index_select(0, index).view(
            rows.shape
        )


class Chunk:
    """What a few clients hold in one exchange (the `Local` of client functions)."""

    def __init__(
        self, gather: Gather, rounds: Rounds, k: int, clients: Ints, position: Ints, steps: Ints
    ) -> None:
        self.k = k
        self.steps = int(steps.max())
        self._gather, self._loaded = gather, (-1, -1)
        self._rounds, self._clients = rounds, clients
        self._seed = key(
            rounds.settings.seed, "module", rounds.first + int(clients[0]), int(position[0]), k
        )
        self._same = rounds.constant(clients)
        self._drawn = self._on_device(
            *_index(rounds, clients, position, 1 if self._same else self.steps)
        )
        self.own_steps = (
            torch.from_numpy(steps).to(gather.fed.x.device, gather.dtype).view(-1, 1, 1)
        )
        self._ragged = bool((steps != self.steps).any())

    def _on_device(self, rows: Ints, weight: Floats) -> tuple[Tensor, Tensor]:
        device = self._gather.fed.x.device
        return torch.from_numpy(rows).to(device), torch.from_numpy(weight).to(
            device, self._gather.dtype
        )

    def _load(self, kind: int, at: int, index: tuple[Tensor, Tensor], key: int) -> Batch:
        if self._loaded != (kind, at):
            self._x, self._y = self._gather(index[0][at])
            self._loaded = kind, at
        return Batch(self._x, self._y, index[1][at], key)

    def batch(self, j: int) -> Batch:
        """The mini-batch of local step j; clients with one batch per epoch see it again without a
        new gather."""
        return self._load(0, 0 if self._same else j, self._drawn, self._seed + j)

    def full(self) -> Iterator[Batch]:
        """All rows, in pieces of equal width; a single piece stays loaded."""
        if self._same:
            yield self.batch(0)
            return
        for i in range(len(self._all[0])):
            yield self._load(1, i, self._all, self._seed + i)

    @cached_property
    def _all(self) -> tuple[Tensor, Tensor]:
        fed = self._gather.fed
        row = fed.x[0].numel() * (torch.finfo(self._gather.dtype).bits // 8 + fed.x.element_size())
        most = max(1, BUDGET[fed.x.device.type] // (row * len(self._clients)))
        return self._on_device(*_whole(self._rounds, self._clients, most))

    def active(self, j: int) -> Tensor | None:
        """Who takes step j; None: everybody."""
        return (self.own_steps > j).to(self._gather.dtype) if self._ragged else None

    def uniform(self, purpose: str, n: int) -> Tensor:
        """Each client's own draws [M, n]."""
        draws = [self._rounds.own_uniform(purpose, i, self.k, n) for i in self._clients.tolist()]
        return torch.stack(draws).to(self._gather.fed.x.device)


def _index(rounds: Rounds, clients: Ints, position: Ints, steps: int) -> tuple[Ints, Floats]:
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


def _whole(rounds: Rounds, clients: Ints, most: int) -> tuple[Ints, Floats]:
    """Row indices and weights [pieces, clients, width] of all rows, at most so many of each client
    in a piece."""
    longest = int(rounds.sizes[clients].max())
    pieces = -(-longest // most)
    width = -(-longest // pieces)
    rows = np.empty((pieces, len(clients), width), np.int64)
    weight = np.zeros((pieces, len(clients), width))
    for m, client in enumerate(clients):
        own = rounds.rows[rounds.start[client] : rounds.start[client + 1]]
        for i, part in enumerate(
            np.array_split(own, pieces)
        ):  # of equal size: BatchNorm cannot take a single row
            rows[i, m, : len(part)], rows[i, m, len(part) :] = part, own[0]
            weight[i, m, : len(part)] = 1 / len(own)
    return rows, weight
