"""The permutations of `torch.randperm`, for very many generators or of very many numbers.

`torch.randperm(n, generator=generator(seed, purpose, i))` takes microseconds: nothing for a
thousand clients, minutes for ten million. The functions here return the same permutations. They
compute what torch does, for all clients at once or for the first few numbers alone:

    seeding    x_0 = key mod 2^32,  x_j = 1812433253 (x_{j-1} ^ x_{j-1} >> 30) + j  mod 2^32
    twisting   y = the highest bit of x_j and the 31 lower ones of x_{j+1};
               x_{j+397} ^ y >> 1 ^ (0x9908b0df if y is odd), then four shifts that temper it
    shuffling  for i = 0, 1, ...: swap r[i] with r[i + random_i mod (n - i)]

The first two are the generator MT19937 of Matsumoto and Nishimura, "Mersenne Twister: a
623-dimensionally equidistributed uniform pseudo-random number generator" (1998); the last is the
shuffle of Fisher and Yates. The first 227 numbers need no word that twisting has changed, which is
why `shuffled` takes groups of up to 228 in this way, and leaves larger ones to torch.
"""

from __future__ import annotations

from hashlib import blake2b
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray

from .rng import generator, key

Ints = NDArray[np.int64]
Words = NDArray[np.uint32]
LONGEST = 228  # of a group that is shuffled together with others
AT_ONCE = 1 << 14  # groups: their words stay in the cache
LAG = 397  # of MT19937
MULTIPLIER = 1812433253
TWIST = np.uint32(0x9908B0DF)
HIGH = np.uint32(1 << 31)
LOW = np.uint32((1 << 31) - 1)
BIT = np.uint32(1)
TWISTER = np.random.RandomState(0)  # seeded anew for each use: a new one costs more than its draws
ONE = Lock()
SPARSE = 16  # one in so many chosen, or fewer: a dictionary is faster than all numbers


def first_of_permutation(n: int, count: int, seed: int, *purpose: str | int) -> Ints:
    """`torch.randperm(n, generator=generator(seed, *purpose))[:count]`, without the others.

    Args:
        n: How many numbers are permuted.
        count: How many of them are wanted.
        seed: As for `generator`.
        purpose: As for `generator`.

    >>> first_of_permutation(10**6, 3, 0, "cohort", 1).tolist() == (
    ...     torch.randperm(10**6, generator=generator(0, "cohort", 1))[:3].tolist()
    ... )
    True
    """
    if count * SPARSE > n:
        draw = generator(seed, *purpose)
        return torch.randperm(n, generator=draw)[:count].numpy()
    low = key(seed, *purpose) & 0xFFFFFFFF
    with ONE:
        TWISTER.seed(low)
        words = TWISTER.randint(0, 1 << 32, count, dtype=np.uint32)
    places = np.arange(count)
    others = places + words % (n - places)
    moved: dict[int, int] = {}  # numbers that are not at their own place
    first = []
    for i, other in enumerate(others.tolist()):
        first.append(moved.get(other, other))
        moved[other] = moved.get(i, i)
    return np.array(first, np.int64)


def shuffled(
    values: Ints,
    start: Ints,
    seed: int,
    purpose: str,
) -> Ints:
    """The values of each group in random order, group after group.

    Group i is `values[start[i]:start[i + 1]]`, n of them, and becomes
    `group[torch.randperm(n, generator=generator(seed, purpose, i))]`.

    Args:
        values: All groups, one after the other, [values].
        start: Where each begins, [groups + 1], with the end of the last.
        seed: As for `generator`.
        purpose: As for `generator`, which adds the number of the group.

    >>> shuffled(np.array([7, 8, 9]), np.array([0, 1, 3]), 0, "split")
    array([7, 9, 8])
    """
    out = values.copy()
    sizes = np.diff(start)
    for group in np.flatnonzero(sizes > LONGEST).tolist():
        own = slice(start[group], start[group + 1])
        draw = generator(seed, purpose, group)
        count = int(sizes[group])
        order = torch.randperm(count, generator=draw)
        out[own] = values[own][order.numpy()]
    # Groups of one value have nothing to shuffle. The others in the order of their size, so that
    # those that are computed together are about as large.
    is_small = (sizes > 1) & (sizes <= LONGEST)
    small = np.flatnonzero(is_small)
    by_size = np.argsort(sizes[small], kind="stable")
    small = small[by_size]
    for begin in range(0, len(small), AT_ONCE):
        groups = small[begin : begin + AT_ONCE]
        seeds = _low_keys(seed, purpose, groups)
        _shuffle(values, out, start[groups], sizes[groups], seeds)
    return out


def _low_keys(seed: int, purpose: str, groups: Ints) -> Words:
    """The lower half of `key(seed, purpose, i)` for each group i: all that MT19937 takes."""
    head = blake2b(f"{seed}/{purpose}/".encode(), digest_size=8)
    digests = []
    for group in groups.tolist():
        hasher = head.copy()
        hasher.update(b"%d" % group)
        digests.append(hasher.digest())
    joined = b"".join(digests)
    numbers = np.frombuffer(joined, dtype=">u8").astype(np.uint64)
    keys = numbers >> np.uint64(1)
    return keys.astype(np.uint32)


def _shuffle(
    values: Ints,
    out: Ints,
    start: Ints,
    sizes: Ints,
    seeds: Words,
) -> None:
    """Shuffle some groups, the smallest first, and write them into `out`."""
    widest = int(sizes[-1])
    words = first_words(seeds, widest - 1)
    order = np.empty((widest, len(sizes)), np.int64)
    order[:] = np.arange(widest)[:, None]
    columns = np.arange(len(sizes))
    for i in range(widest - 1):
        ready = int(np.searchsorted(sizes, i + 1, "right"))  # groups before have no value left
        those = columns[ready:]
        unplaced = sizes[ready:] - i
        other = i + words[i, ready:] % unplaced
        kept = order[other, those]
        order[other, those] = order[i, ready:]
        order[i, ready:] = kept
    for i in range(widest):
        ready = int(np.searchsorted(sizes, i, "right"))
        begin = start[ready:]
        out[begin + i] = values[begin + order[i, ready:]]


def first_words(seeds: Words, count: int) -> Words:
    """The first numbers of one generator MT19937 for each seed, [count, seeds].

    Args:
        seeds: 32 bits for each generator.
        count: How many numbers of each; at most 227.
    """
    many = len(seeds)
    head = np.empty((count + 1, many), np.uint32)  # x_0 to x_count
    tail = np.empty((count, many), np.uint32)  # x_397 and those that follow
    word = seeds.copy()
    shifted = np.empty_like(word)
    head[0] = word
    for j in range(1, LAG + count):
        np.right_shift(word, 30, out=shifted)
        np.bitwise_xor(word, shifted, out=word)
        np.multiply(word, MULTIPLIER, out=word)
        np.add(word, j, out=word)
        if j <= count:
            head[j] = word
        if j >= LAG:
            tail[j - LAG] = word
    return _tempered(_twisted(head, tail))


def _twisted(head: Words, tail: Words) -> Words:
    """The new words of the state, of x_j and x_{j+1} in `head` and x_{j+397} in `tail`."""
    high = head[:-1] & HIGH
    low = head[1:] & LOW
    both = high | low
    odd = both & BIT
    twisted: Words = tail ^ (both >> BIT) ^ (odd * TWIST)
    return twisted


def _tempered(words: Words) -> Words:
    """The numbers that the generator makes of its words; they are written over."""
    words ^= words >> 11
    some = words << 7
    words ^= some & 0x9D2C5680
    some = words << 15
    words ^= some & 0xEFC60000
    words ^= words >> 18
    return words
