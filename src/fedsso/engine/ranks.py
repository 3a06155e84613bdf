"""Several processes that run the same trials together, each with a part of the clients.

`torchrun` starts the processes, called ranks; `torch.distributed` carries what they exchange.
Every rank holds the whole state of the server and takes the same decisions. What they share out:

    clients     each rank computes the clients that `deal` gives it, stacked as always
    sums        one all-reduce of one flat buffer makes the mean of an exchange, alike on all ranks
    evaluation  each rank takes an equal part of the rows
    folders     the first rank alone reads, writes and prints; it tells the others what to do

An all-reduce gives every rank the same bits: each number is summed up in one place and copied from
there. So the server's step, computed on every rank from the same bits by the same code, has the
same result everywhere. A check in every round ends the run where it has not, as may happen between
processors of different kinds.

Where a client lives. An algorithm whose clients keep nothing between rounds is dealt anew in every
round, by the work of those who answer. Where a client has a state, a memory at the server or an
error of compression, it has a home: clients are dealt once, by their rows, and stay. A state then
never travels, but for checkpoints. The price is that a small cohort may be unevenly spread over
the homes. Rejected: dealing anew in every round and sending states after their clients, which for
FedNL would move a d x d matrix for each client that changes its place.

With one process there is a `Team` of one, whose methods do nothing.
"""

from __future__ import annotations

import atexit
import gc
import heapq
import importlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InputError
from ..support.processes import seconds_of
from ..support.trees import Tree, leaves, tree_map
from .rounds import Ints

T = TypeVar("T")
TIMEOUT = "FEDSSO_RANK_TIMEOUT"
"""The environment variable that says how many seconds one rank waits for the others."""
PATIENCE = 600.0  # seconds, if the variable says nothing else
MEETING = 120.0  # seconds at most until torchrun's store answers: it may have been killed
CHECKED = 2**48  # checksums are kept below it, so that their sum over ranks is exact in float64


class RankLost(RuntimeError):
    """Another process of this run has ended or does not answer, so that this one cannot go on.

    `what` says so without the way out, for whoever knows the folder of the run.
    """

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; `fedsso resume` continues a run that has a folder")
        self.what = what


class Team:
    """The processes that run trials together: here one alone.

    `rank` is the number of this process, `size` how many there are. `spent` counts the bytes and
    seconds of all-reduces so far.
    """

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.spent = Spent()
        self.asked = False  # whether this process was asked to stop
        self.halts = False  # whether all know that one was, and stop after this round

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that reads, writes and prints."""
        return self.rank == 0

    def sum(self, tree: Tree) -> Tree:
        """The sum of the ranks' trees, leaf by leaf, the same on every rank."""
        return tree

    def apart(self, leaf: Tensor) -> Tensor:
        """A leaf as a row of its own, [ranks, ...]: after `sum` row r is what rank r gave."""
        return leaf.unsqueeze(0)

    def share(self, thing: T, source: int = 0) -> T:  # noqa: ARG002
        """What one rank gives, the first by default; what the others give is left alone."""
        return thing

    def gather(self, thing: T) -> list[T]:
        """What each rank gives, in their order; for the first rank alone, the others get []."""
        return [thing]

    def told(self, work: Callable[[], T]) -> T:
        """What a function returns in the first rank, which alone calls it, or its InputError."""
        if self.size == 1:
            return work()
        found: Any = None
        error: InputError | None = None
        if self.is_first:
            try:
                found = work()
            except InputError as wrong:
                error = wrong
        found, error = self.share((found, error))
        if error is not None:
            raise error
        return found  # type: ignore[no-any-return]


class Spent:
    """Bytes and seconds of all-reduces."""

    def __init__(self) -> None:
        self.bytes = 0
        self.seconds = 0.0


class Ranks(Team):
    """Several processes, joined by `torch.distributed`.

    Tensors on a CPU travel by gloo, those on a GPU by NCCL, or by gloo where processes share a
    GPU.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank = rank
        self.size = size

    def sum(self, tree: Tree) -> Tree:
        """As in `Team`, by one all-reduce of one flat buffer of the widest type among the leaves.

        The seconds in `spent` contain the wait for the slowest rank.
        """
        parts = list(leaves(tree))
        if not parts:
            return tree
        kind = parts[0].dtype
        for part in parts:
            kind = torch.promote_types(kind, part.dtype)
        flat = torch.cat([part.reshape(-1).to(kind) for part in parts])
        _wait_for(flat)
        began = time.perf_counter()
        with _together():
            dist.all_reduce(flat)
            _wait_for(flat)
        self.spent.seconds += time.perf_counter() - began
        self.spent.bytes += flat.numel() * flat.element_size()
        pieces = iter(torch.split(flat, [part.numel() for part in parts]))
        return tree_map(lambda leaf: next(pieces).view(leaf.shape).to(leaf.dtype), tree)

    def apart(self, leaf: Tensor) -> Tensor:
        """As in `Team`: the rows of the others are 0."""
        room = leaf.new_zeros(self.size, *leaf.shape)
        room[self.rank] = leaf
        return room

    def share(self, thing: T, source: int = 0) -> T:
        """As in `Team`. The thing is pickled."""
        box = [thing if self.rank == source else None]
        with _together():
            dist.broadcast_object_list(box, src=source, device=torch.device("cpu"))
        return box[0]  # type: ignore[return-value]

    def gather(self, thing: T) -> list[T]:
        """As in `Team`. The things are pickled."""
        box: list[Any] | None = [None] * self.size if self.is_first else None
        with _together():
            dist.gather_object(thing, box, dst=0)
        return box or []


@contextmanager
def _together() -> Iterator[None]:
    """Something that all ranks do; where one of them is gone it becomes a sentence."""
    try:
        yield
    except RuntimeError as error:  # torch has no narrower one for gloo
        raise RankLost(
            "another process of this run has ended, or has not answered for "
            f"{patience():g} s ({TIMEOUT})"
        ) from error


def patience() -> float:
    """How many seconds one rank waits for the others.

    Raises:
        InputError: The environment variable is not a number above 0.
    """
    return seconds_of(TIMEOUT, PATIENCE)


def _wait_for(tensor: Tensor) -> None:
    """Wait until a GPU has computed a tensor; on a CPU it is there."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


# ---- who computes what ----


def deal(work: Ints, size: int) -> Ints:
    """The rank of each client, so that all ranks have about the same work.

    The largest come first, and each goes to the rank that has least so far. Every rank deals
    alike, because nothing but the arguments decides.

    >>> deal(np.array([5, 9, 4, 1]), 2).tolist()
    [1, 0, 1, 0]
    """
    ranks = np.zeros(len(work), np.int64)
    loads = [(0, rank) for rank in range(size)]
    for client in np.argsort(-work, kind="stable").tolist():
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + int(work[client]), rank))
        ranks[client] = rank
    return ranks


def checksum(tensor: Tensor) -> int:
    """A number that tells apart tensors with other bits; the order of the sum does not matter."""
    bits = tensor.contiguous()
    if bits.is_floating_point():
        bits = bits.view(torch.int32 if bits.element_size() == 4 else torch.int64)
    return int(bits.sum(dtype=torch.int64)) % CHECKED


# ---- the team of this process ----


_teams: list[Team] = []


def team() -> Team:
    """The processes that this one works with, as torchrun has started them; joined once.

    Raises:
        InputError: The environment speaks of several processes, but they cannot be joined.
    """
    if not _teams:
        _teams.append(_joined())
    return _teams[0]


def _joined() -> Team:
    """The team by what the caller has set up, or else by the environment."""
    if dist.is_available() and dist.is_initialized():
        return _of_size(dist.get_rank(), dist.get_world_size())
    told = os.environ.get("WORLD_SIZE", "1")
    if told == "1" or "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        return Team()
    try:
        return _met(int(told))
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"the processes that WORLD_SIZE={told} speaks of cannot be joined ({error}); start "
            f"them by torchrun, or unset WORLD_SIZE and RANK"
        ) from error


def _met(size: int) -> Team:
    """The team of so many processes that torchrun has started.

    Raises:
        RuntimeError: They do not meet.
        ValueError: The environment is not that of torchrun.
    """
    from torch.distributed.rendezvous import rendezvous  # which not every build of torch has

    # Functions of this module take the group that exists at their import as a default. Imported
    # before there is one, they keep none alive, and `_leave` can end its threads.
    importlib.import_module("torch.distributed.nn")
    local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(local % torch.cuda.device_count())
        if here <= torch.cuda.device_count():  # NCCL wants a GPU for each process
            backend = "cpu:gloo,cuda:nccl"
    wait = timedelta(seconds=patience())
    meeting = min(wait, timedelta(seconds=MEETING))
    store, rank, _ = next(rendezvous("env://", timeout=meeting))
    store.set_timeout(wait)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=wait)
    atexit.register(_leave)
    return _of_size(dist.get_rank(), size)


def _of_size(rank: int, size: int) -> Team:
    """A team of so many, of which this process is number `rank`."""
    return Team() if size == 1 else Ranks(rank, size)


def _leave() -> None:
    """Let the others go, and end the group's threads, at the end of the process.

    A thread that lets go of its last tensor after the interpreter has ended would abort the
    process.
    """
    with suppress(RuntimeError, ValueError, AssertionError):
        dist.destroy_process_group()
    gc.collect()
