"""Clients that are computed one by one, as many at a time as there are threads.

Where clients cannot be stacked (convolutions on a CPU, LSTM, BatchNorm), sharing out the work of
one small mini-batch over several threads wastes much of them. So every thread computes a client of
its own, with one thread's arithmetic: how many of them there are changes no bit of a result. What
the clients send is handed over in their order, in which it is then summed up.

How many there are is torch's own number of threads, which torchrun and the workers of a sweep have
divided by the number of processes. A GPU, stacked clients, algorithms that hold d x d matrices and
those that need second derivatives, for which torch switches kernels of the whole process, are left
to the caller's thread.

A module that draws random numbers does so from torch's one stream, which is seeded before each
client and so cannot be shared. It is found out by looking: where the stream has moved, or that of
numpy or Python, the client is computed again, and all later ones, by the caller alone, with all
threads for each client. A module with a generator of its own is not found out: for such a one set
OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Barrier
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..objective.looped import Looped

if TYPE_CHECKING:
    from ..algorithm.contract import Algorithm
    from ..objective import Backend
    from .gather import Gather

log = logging.getLogger("fedsso")
S = TypeVar("S")
T = TypeVar("T")
AHEAD = 2  # clients that are begun, for each thread, before the first of them is handed over


@dataclass(frozen=True)
class Desk:
    """What the work of a client is computed with; one thread uses it at a time."""

    f: Backend
    gather: Gather


class Streams(NamedTuple):
    """How far the generators of torch, numpy and Python are."""

    torch: Tensor
    numpy: tuple[Any, ...]
    python: tuple[Any, ...]

    @classmethod
    def now(cls) -> Streams:
        """Where they are at present."""
        legacy: Any = np.random.get_state()
        return cls(torch.get_rng_state(), legacy, random.getstate())

    def are_still(self) -> bool:
        """Whether nobody has drawn since."""
        now = Streams.now()
        same = torch.equal(now.torch, self.torch) and now.python == self.python
        keys = np.array_equal(now.numpy[1], self.numpy[1])
        return same and keys and now.numpy[2:] == self.numpy[2:]

    def restore(self) -> None:
        """Take back what was drawn since."""
        torch.set_rng_state(self.torch)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


class Crew:
    """Does the work of clients, by several threads where that is possible.

    Args:
        desk: For the caller's own thread.
        another: Makes one more gather over the same rows.
        algorithm: What is computed.
        device: Where it is computed.
    """

    def __init__(
        self,
        desk: Desk,
        another: Callable[[], Gather],
        algorithm: Algorithm,
        device: torch.device,
    ) -> None:
        self.desk = desk
        self._another = another
        self._pool: ThreadPoolExecutor | None = None
        self._free: SimpleQueue[Desk] | None = None
        self._size = 0
        one_by_one = isinstance(desk.f, Looped) and device.type == "cpu"
        heavy = algorithm.alone or algorithm.squares > 0 or algorithm.asks() == "hvp"
        self.together = one_by_one and not heavy  # whether several threads may work

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins without threads, which cannot be copied."""
        return {**vars(self), "_pool": None, "_free": None}

    def each(self, work: Callable[[Desk, S], T], shares: Sequence[S]) -> Iterator[T]:
        """work(desk, share) for every share, in their order."""
        done = 0
        if self.together and torch.get_num_threads() > 1:
            for result in self._by_threads(work, shares):
                done += 1
                yield result
        for share in shares[done:]:
            yield work(self.desk, share)

    def _by_threads(self, work: Callable[[Desk, S], T], shares: Sequence[S]) -> Iterator[T]:
        """The same by several threads; it ends early where the module has drawn numbers.

        Whatever ends it, no thread is at work afterwards.
        """
        pool, free = self._manned(torch.get_num_threads())
        streams = Streams.now()

        def at_a_desk(share: S) -> T:
            desk = free.get()
            try:
                return work(desk, share)
            finally:
                free.put(desk)

        begun: deque[Future[T]] = deque()
        rest = iter(shares)
        try:
            for _ in range(len(shares)):
                while len(begun) < AHEAD * self._size and (share := next(rest, None)) is not None:
                    begun.append(pool.submit(at_a_desk, share))
                result = begun[0].result()
                if not streams.are_still():
                    self.together = False
                    break
                begun.popleft()
                yield result
        finally:
            for future in begun:
                future.cancel()
            wait(begun)
        if not self.together:
            streams.restore()
            log.info("the model draws random numbers: clients are computed one after the other")

    def _manned(self, threads: int) -> tuple[ThreadPoolExecutor, SimpleQueue[Desk]]:
        """A pool of so many threads that compute with one thread each, and a desk for each.

        Torch's number of threads is one of the thread that sets it, but new threads begin with
        the number that was set last: it is set again by the caller when all have begun.
        """
        if self._pool is not None and self._free is not None and self._size == threads:
            return self._pool, self._free
        free: SimpleQueue[Desk] = SimpleQueue()
        for _ in range(threads):
            assert isinstance(self.desk.f, Looped)
            f = self.desk.f.twin()
            f.draws = False
            free.put(Desk(f, self._another()))
        pool = ThreadPoolExecutor(threads, "fedsso-client", _begin)
        all_begun = Barrier(threads + 1)
        try:
            for _ in range(threads):
                pool.submit(all_begun.wait)
            all_begun.wait()
        except BaseException:  # a thread that waits on would keep the process from ending
            all_begun.abort()
            pool.shutdown(wait=False)
            raise
        torch.set_num_threads(threads)
        self._pool = pool
        self._free = free
        self._size = threads
        log.info("clients one by one, %d at a time, with a thread each", threads)
        return pool, free


def _begin() -> None:
    """Set up a new thread: one thread's arithmetic, and autograd off, as in the caller's.

    Asking for the number first makes torch remember that this thread has one: it would else take
    the caller's with its first operation.
    """
    torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
