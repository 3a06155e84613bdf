"""One value for each client, of which a round changes a few.

A round works on a copy of the state, so that an interrupt loses nothing. Of a million clients a
hundred take part: what a round costs must not go with the million. `PerClient` copies the values
of the clients that are changed and a few neighbours, and shares the others. `Absence` counts how
long each client has been away without touching those who are.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
T = TypeVar("T")
WIDTH = 128  # values of a block


class PerClient(Sequence[T], Generic[T]):
    """A list of values, one for each client, whose copies share all blocks that stay the same.

    Args:
        values: The values of all clients.

    >>> old = PerClient.alike(1000, 0)
    >>> new = old.copy()
    >>> new.put([3, 999], [7, 8])
    >>> old[3], new[3], new[-1], new.shared(old)
    (0, 7, 8, 6)
    """

    def __init__(self, values: Sequence[T]) -> None:
        starts = range(0, len(values), WIDTH)
        self._blocks = [_block(values[begin : begin + WIDTH]) for begin in starts]
        self._size = len(values)
        self._mine: set[int] = set()  # blocks that no copy shares

    @classmethod
    def alike(cls, size: int, value: T) -> PerClient[T]:
        """The same value for every client. All blocks are one object."""
        made = cls([])
        made._blocks = [_block([value]) * WIDTH] * -(-size // WIDTH)
        made._size = size
        return made

    def copy(self) -> PerClient[T]:
        """The same values; what is put into the copy does not change this one.

        Nothing may be put into this one afterwards.
        """
        made: PerClient[T] = PerClient([])
        made._blocks = self._blocks.copy()
        made._size = self._size
        return made

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        return islice(chain.from_iterable(self._blocks), self._size)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return list(self)[i]
        place = range(self._size)[i]
        return self._blocks[place // WIDTH][place % WIDTH]

    def take(self, clients: Sequence[int]) -> list[T]:
        """The values of some clients."""
        blocks = self._blocks
        return [blocks[i // WIDTH][i % WIDTH] for i in clients]

    def put(self, clients: Sequence[int], values: Sequence[T]) -> None:
        """Replace the values of some clients."""
        blocks = self._blocks
        mine = self._mine
        for i, value in zip(clients, values, strict=True):
            block = i // WIDTH
            if block not in mine:
                blocks[block] = blocks[block][:]
                mine.add(block)
            blocks[block][i % WIDTH] = value

    def shared(self, other: PerClient[T]) -> int:
        """How many blocks both of them hold."""
        pairs = zip(self._blocks, other._blocks, strict=True)
        return sum(mine is theirs for mine, theirs in pairs)

    def changed_from(self, old: PerClient[T]) -> list[int]:
        """The clients whose value is another object than in `old`."""
        found = []
        pairs = zip(self._blocks, old._blocks, strict=True)
        for number, (block, before) in enumerate(pairs):
            if block is before:
                continue
            for place, (value, was) in enumerate(zip(block, before, strict=True)):
                if value is not was:
                    found.append(number * WIDTH + place)
        return found

    def merged(self, old: PerClient[T], both: Callable[[T, T], T]) -> PerClient[T]:
        """`both(old value, value)` for clients whose value was replaced; others keep theirs."""
        changed = self.changed_from(old)
        made = self.copy()
        pairs = zip(old.take(changed), self.take(changed), strict=True)
        made.put(changed, [both(before, now) for before, now in pairs])
        return made


def _block(values: Sequence[T]) -> Any:
    """A list of the values; of integers an array, which is copied several times faster."""
    if values and isinstance(values[0], int):
        return array("q", values)
    return list(values)


class Absence(NamedTuple):
    """How often the others have answered since each client did, on average.

    Clients that answered last at the same time have been away equally long. So there is one sum for
    each time at which somebody was last heard of, the oldest first, and each client knows its own.
    """

    times: PerClient[int]  # of each client; they are numbered on and on
    first: int  # the number of the oldest
    sums: Floats  # how much was heard since each of them
    left: Ints  # how many clients have not been heard of since

    @classmethod
    def none(cls, clients: int) -> Absence:
        """Nobody has been away."""
        return cls(PerClient.alike(clients, 0), 0, np.zeros(1), np.full(1, clients))

    @classmethod
    def of(cls, sums: Floats) -> Absence:
        """Read what `each` returned."""
        found, times, left = np.unique(-sums, return_inverse=True, return_counts=True)
        return cls(PerClient(times.tolist()), 0, 0.0 - found, left.astype(np.int64))

    def each(self) -> Floats:
        """The number of each client, [clients]."""
        times = np.fromiter(self.times, np.int64, len(self.times))
        return self.sums[times - self.first]

    def heard(self, clients: Sequence[int], mass: float) -> Absence:
        """What follows when some clients answer, whose share of all weights is `mass`.

        The work goes with these clients, and with the times that are still in use.
        """
        new = self.first + len(self.sums)
        everybody = len(self.times)
        if len(clients) == everybody:
            alike = PerClient.alike(everybody, new)
            return Absence(alike, new, np.zeros(1), np.full(1, everybody))
        left = np.append(self.left, len(clients))
        before = np.array(self.times.take(clients), np.int64)
        np.subtract.at(left, before - self.first, 1)
        times = self.times.copy()
        times.put(clients, [new] * len(clients))
        used = int(np.argmax(left > 0))
        sums = np.append(self.sums + mass, 0.0)
        return Absence(times, self.first + used, sums[used:], left[used:])

    def beyond(self, limit: float) -> list[int]:
        """The clients whose number is larger than the limit, in ascending order."""
        if self.sums[0] <= limit:
            return []
        gone = self.first + int((self.sums > limit).sum())
        return [i for i, time in enumerate(self.times) if time < gone]
