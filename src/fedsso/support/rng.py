"""Randomness as data: every draw is a pure function of (seed, purpose, ...), so no generator is
ever saved."""

from __future__ import annotations

from hashlib import blake2b

import torch


def key(seed: int, *purpose: str | int) -> int:
    """A 63-bit integer that depends on every argument and on nothing else."""
    text = "/".join(map(str, (seed, *purpose)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A CPU generator for one purpose, the same on every machine and device."""
    return torch.Generator().manual_seed(key(seed, *purpose))
