"""Randomness without state: every draw is a pure function of a seed and a purpose.

A purpose is a list of words and numbers, such as ("batch", client, round). Two purposes give
independent draws, the same purpose gives the same draw, and the order of draws does not matter. So
no generator ever has to be saved, and a resumed run draws what an uninterrupted one would.
"""

from __future__ import annotations

from hashlib import blake2b

import torch


def key(seed: int, *purpose: str | int) -> int:
    """A 63-bit integer that depends on the seed and the purpose, and on nothing else.

    >>> key(0, "split", 3) == key(0, "split", 3) != key(1, "split", 3)
    True
    """
    words = map(str, (seed, *purpose))
    text = "/".join(words)
    hasher = blake2b(text.encode(), digest_size=8)
    number = int.from_bytes(hasher.digest(), "big")
    return number >> 1


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A generator for one purpose. It is on the CPU, where draws are the same on any machine."""
    own_seed = key(seed, *purpose)
    return torch.Generator().manual_seed(own_seed)
