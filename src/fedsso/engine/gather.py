"""Mini-batches for a chunk of clients, gathered into buffers that are used again and again.

`Gather` reads rows of the federation by their numbers and widens them; `SparseGather` makes sparse
matrices of them. `Chunk` knows which rows the clients of one chunk see in each local step, and is
what an algorithm's client function gets as its `Local`.

Rows stay uint8 until they are gathered: widening a batch is cheaper than reading four times the
bytes. Clients of a chunk have batches of unequal width. Narrow ones are padded with a row of the
same client that has weight 0, so that all are computed as one tensor [clients, width, *sample].

What is the same in every round is kept: the row numbers of clients whose batch is all they have,
and the matrices of sparse rows that they make. `Kept` bounds the memory that this takes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..algorithm.contract import Batch
from ..data.mapped.rows import MappedRows
from ..support.rng import key
from ..support.sparse import blocks, entries, transposed

if TYPE_CHECKING:
    from ..data import Federation
    from .rounds import Ints, Rounds

Floats = NDArray[np.float64]
Drawn = tuple[Tensor, Tensor]  # row numbers and weights of some batches, [batches, M, width] each
MINI = 0  # kinds of batches: mini-batches, and pieces of all rows
WHOLE = 1
BUDGET = {"cpu": 24 << 20, "cuda": 8 << 30}  # bytes of a chunk of clients
KEPT = 256 << 20  # bytes of row numbers that are kept; cohorts of very many clients never recur
INDEX = 4  # bytes of a column number in a sparse matrix
T = TypeVar("T")


class Kept:
    """Things that are made once and kept while there is room.

    What does not fit is made again whenever it is asked for. Nothing is thrown out for it: where
    the same things are asked for in turn, the ones that came first stay useful.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._held: dict[Hashable, object] = {}

    def __call__(self, name: Hashable, make: Callable[[], T], size: Callable[[T], int]) -> T:
        """What `make` makes, kept by a name that tells it from all others; `size` in bytes."""
        found = self._held.get(name)
        if found is not None:
            return found  # type: ignore[return-value]
        made = make()
        needed = size(made)
        if needed <= self._room:
            self._room -= needed
            self._held[name] = made
        return made


class Gather:
    """Rows of a federation as floating-point batches, in buffers that it owns.

    Buffers are used again so that no local step pays for fresh memory. Whoever needs two batches
    at the same time takes two `Gather` objects, as the simulator does for training and
    evaluation.
    """

    def __init__(self, fed: Federation, dtype: torch.dtype) -> None:
        self.fed = fed
        self.dtype = dtype
        self.y = fed.y if fed.classes else fed.y.to(dtype)
        wide = torch.finfo(dtype).bits // 8
        self.row_bytes = fed.sample_shape.numel() * (
            wide + fed.x.element_size()
        )  # while it is used
        self.kept = Kept(min(64 * len(fed.y), KEPT))
        self._prepare()

    def _prepare(self) -> None:
        """Make the buffers, which grow when they are used."""
        fed, dtype = self.fed, self.dtype
        self.flat = fed.x.flatten(1)
        self._shift = fed.x.new_full((), fed.affine[1], dtype=dtype)
        self._raw = fed.x.new_empty(0)
        self._wide = fed.x.new_empty(0, dtype=dtype)

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The samples x [*rows, *sample] and targets y [*rows] of some row numbers.

        x is scale * stored + shift, with the federation's `affine` pair. It is overwritten by the
        next call; y is not. Targets are integers for classes, else of the gather's type.
        """
        n = rows.numel()
        width = self.flat.shape[1]
        # The buffers grow to the largest batch so far and never shrink.
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
        if self.fed.affine != (1.0, 0.0):
            scale = self.fed.affine[0]
            torch.add(self._shift, wide, alpha=scale, out=wide)  # scale and shift in one pass
        x = wide.view(*rows.shape, *self.fed.x.shape[1:])
        return x, self.targets(rows)

    def targets(self, rows: Tensor) -> Tensor:
        """The targets [*rows] of some row numbers."""
        return self.y.index_select(0, rows.reshape(-1)).view(rows.shape)

    def batch(
        self,
        rows: Tensor,
        weight: Tensor,
        fixed: Hashable = None,  # noqa: ARG002
    ) -> Batch:
        """A batch of row numbers [M, B] with weights, 0 on padding.

        `fixed` names a batch that is asked for again and again, which sparse rows make use of.
        """
        x, y = self(rows)
        return Batch(x, y, weight)

    def piece(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Row numbers [n] as the rows of one client for `Backend.predict`, and their targets."""
        x, y = self(rows)
        return x.unsqueeze(0), y


class SparseGather(Gather):
    """The same for sparse rows, which are not widened: a batch is a block-diagonal matrix.

    Batches that come again are kept, with their transposes. Together they are a small multiple of
    what the federation itself holds.
    """

    def _prepare(self) -> None:
        x = self.fed.x
        wide = torch.finfo(self.dtype).bits // 8
        held = len(x.values())
        per_row = -(-held // max(1, len(x)))
        # A matrix and its transpose.
        self.row_bytes = 2 * (per_row * (wide + INDEX) + INDEX)
        self.kept = Kept(64 * len(x) + 4 * held * (wide + INDEX))

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The matrix [M B, M width] of row numbers [M, B], and the targets [M, B]."""
        return blocks(self.fed.x, rows, None, self.dtype), self.targets(rows)

    def batch(self, rows: Tensor, weight: Tensor, fixed: Hashable = None) -> Batch:
        """As in `Gather`. Padding has no entries."""

        def make() -> Batch:
            x = blocks(self.fed.x, rows, weight > 0, self.dtype)
            return Batch(x, self.targets(rows), weight, transposed=transposed(x))

        def size(batch: Batch) -> int:
            pair = (batch.x, batch.transposed)
            return sum(_bytes(one) for one in pair if one is not None)

        return make() if fixed is None else self.kept(fixed, make, size)

    def piece(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """As in `Gather`.

        The rows of an evaluation are a part of a tensor that stays: its place in memory names it,
        and no other tensor gets that place while it is kept here.
        """

        def make() -> tuple[Tensor, Tensor, Tensor]:
            return (*self(rows.unsqueeze(0)), rows)

        name = (rows.data_ptr(), len(rows))
        x, y, _ = self.kept(name, make, lambda made: _bytes(made[0]))
        return x, y[0]


class MappedGather(Gather):
    """The same for rows in files, which are read when they are gathered."""

    def _prepare(self) -> None:
        """Nothing is kept: the operating system keeps what was read as long as there is room."""

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """As in `Gather`, but x is not overwritten by the next call."""
        stored = self.fed.x[rows.reshape(-1).cpu()]
        wide = stored.to(self.y.device).to(self.dtype)
        if self.fed.affine != (1.0, 0.0):
            scale, offset = self.fed.affine
            shift = wide.new_full((), offset)
            torch.add(shift, wide, alpha=scale, out=wide)
        return wide.view(*rows.shape, *self.fed.x.shape[1:]), self.targets(rows)


def _bytes(x: Tensor) -> int:
    """What a sparse matrix takes in memory."""
    return sum(part.numel() * part.element_size() for part in entries(x))


def gathering(fed: Federation, dtype: torch.dtype) -> Gather:
    """The gather that suits the rows of a federation."""
    if isinstance(fed.x, MappedRows):
        return MappedGather(fed, dtype)
    return SparseGather(fed, dtype) if fed.is_sparse else Gather(fed, dtype)


class Chunk:
    """What a few clients hold in one exchange (the `Local` of client functions).

    Args:
        gather: Where rows come from. Other users of it overwrite this chunk's batches.
        rounds: The run's draws.
        k: The round.
        clients: Their indices in the federation, [M].
        position: How many mini-batches each has drawn before this exchange, [M].
        steps: The local steps that each takes now, [M]; all 0 in an exchange without
            mini-batches.

    `steps` as an attribute is the largest of them. A client with fewer steps still goes through
    all of them; `active` tells the algorithm whose steps count.
    """

    def __init__(
        self, gather: Gather, rounds: Rounds, k: int, clients: Ints, position: Ints, steps: Ints
    ) -> None:
        self.k = k
        self.steps = int(steps.max())
        self._gather = gather
        self._loaded = (-1, -1)  # the kind and number of the batch that is in the buffers
        self._rounds = rounds
        self._clients = clients
        # One seed for the chunk. It is used by modules that draw, which are computed one client
        # at a time, so that the chunk is a single client wherever the seed matters.
        first = rounds.first + int(clients[0])
        self._seed = key(rounds.settings.seed, "module", first, int(position[0]), k)
        self._same = rounds.constant(clients)
        self._names = clients.tobytes()
        self._drawn = self._draw(position)
        each = torch.from_numpy(steps).to(gather.fed.y.device, gather.dtype)
        self.own_steps = each.view(-1, 1, 1)
        self.optimizer = rounds.settings.optimizer
        self._ragged = bool((steps != self.steps).any())

    def _draw(self, position: Ints) -> Drawn:
        """Row numbers and weights of the mini-batches; of one where all steps see the same."""
        if not self._same:
            return self._on_device(*_index(self._rounds, self._clients, position, self.steps))

        def make() -> Drawn:
            return self._on_device(*_index(self._rounds, self._clients, position, 1))

        return self._gather.kept((MINI, self._names), make, _size)

    def _on_device(self, rows: Ints, weight: Floats) -> Drawn:
        """Row numbers (int64) and weights (in the run's type) on the device of the rows."""
        device = self._gather.fed.y.device
        index = torch.from_numpy(rows).to(device)
        return index, torch.from_numpy(weight).to(device, self._gather.dtype)

    def _load(self, kind: int, number: int, drawn: Drawn, seed: int) -> Batch:
        """A batch of the drawn ones; it is gathered unless it is in the buffers already.

        Args:
            kind: MINI for a mini-batch, WHOLE for a piece of all rows.
            number: Which one of that kind.
            drawn: Row numbers and weights of all batches of the kind, [number, M, width] each.
            seed: For modules that draw.
        """
        if self._loaded != (kind, number):
            index, weight = drawn
            again = self._same or kind == WHOLE
            fixed = (kind, number, self._names) if again else None
            self._batch = self._gather.batch(index[number], weight[number], fixed)
            self._loaded = (kind, number)
        return self._batch._replace(key=seed)

    def batch(self, j: int) -> Batch:
        """The mini-batch of local step j = 0, 1, ..., [M, width, *sample].

        Clients with one batch per epoch see it again without a new gather.
        """
        number = 0 if self._same else j
        return self._load(MINI, number, self._drawn, self._seed + j)

    def full(self) -> Iterator[Batch]:
        """All rows of the clients, in pieces of equal width; a single piece stays loaded.

        The weights of a client's rows sum to 1 over all pieces. Where a mini-batch is all that
        each client has, it is that one.
        """
        if self._same:
            yield self.batch(0)
            return
        for i in range(len(self._all[0])):
            yield self._load(WHOLE, i, self._all, self._seed + i)

    @cached_property
    def _all(self) -> Drawn:
        """Row numbers and weights of all rows, in pieces that the budget holds.

        Each is [pieces, M, width]. They are made when an algorithm first asks for all rows.
        """
        device = self._gather.fed.y.device
        most = max(1, BUDGET[device.type] // (self._gather.row_bytes * len(self._clients)))

        def make() -> Drawn:
            return self._on_device(*_whole(self._rounds, self._clients, most))

        return self._gather.kept((WHOLE, self._names), make, _size)

    def active(self, j: int) -> Tensor | None:
        """Who takes step j, [M, 1, 1] of 0 and 1.

        None means everybody, so that nothing has to be multiplied.
        """
        if not self._ragged:
            return None
        return (self.own_steps > j).to(self._gather.dtype)

    def uniform(self, purpose: str, n: int) -> Tensor:
        """Each client's own draws, float64 [M, n] in (0, 1).

        The same purpose gives the same numbers again within a round: an algorithm that needs
        several draws gives each of them a word of its own, or asks for all of them at once.
        """
        if n == 0:
            return self.own_steps.new_empty(len(self._clients), 0, dtype=torch.float64)
        draws = [self._rounds.own_uniform(purpose, i, self.k, n) for i in self._clients.tolist()]
        return torch.stack(draws).to(self._gather.fed.y.device)


def _size(drawn: Drawn) -> int:
    """The bytes of row numbers and weights."""
    return sum(part.numel() * part.element_size() for part in drawn)


def _index(rounds: Rounds, clients: Ints, position: Ints, steps: int) -> tuple[Ints, Floats]:
    """Row indices and weights [steps, clients, width]; short batches repeat a row with weight 0.

    `position` [clients] is the number of each client's first mini-batch here. A row of a batch of
    w rows weighs 1/w, so that a short last batch of an epoch is a mean as well.
    """
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
    """Row indices and weights [pieces, clients, width] of all rows of the clients.

    A piece holds at most `most` rows of each client. Every client is cut into the same number of
    pieces; a client with few rows has pieces that are mostly padding. A row weighs 1 over the
    client's rows, so that the pieces add up to its mean.
    """
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
            rows[i, m, : len(part)] = part
            rows[i, m, len(part) :] = own[0]
            weight[i, m, : len(part)] = 1 / len(own)
    return rows, weight
