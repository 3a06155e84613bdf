"""Inner products and solves that keep their digits."""

from __future__ import annotations

import torch
from torch import Tensor

CACHED = 1 << 18  # float64 numbers that are widened at a time


def gram(*vectors: Tensor) -> Tensor:
    """All inner products of n vectors [..., d] in float64, [..., n, n]; they are widened block by
    block, in cache."""
    first, n = vectors[0], len(vectors)
    lead, d = first.shape[:-1], first.shape[-1]
    width = min(d, max(1024, CACHED // max(1, n * first[..., 0].numel()))) if first.is_cpu else d
    wide = first.new_empty(*lead, n, width, dtype=torch.float64)
    total = wide.new_zeros(*lead, n, n)
    for start in range(0, d, width):
        block = wide[..., : min(width, d - start)]
        for i, v in enumerate(vectors):
            block[..., i, :] = v[..., start : start + width]
        total += block @ block.mT
    return total


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner product over the last axis in float64, [..., 1]."""
    if max(a.numel(), b.numel()) <= CACHED:  # no blocks: a call of gram takes eight times as long
        return (a.double() * b.double()).sum(-1, keepdim=True)
    return gram(a, b)[..., 0, 1:]


def norm(a: Tensor) -> Tensor:
    """Euclidean length over the last axis in float64, [..., 1]."""
    return gram(a)[..., 0, :].sqrt()


def solve(A: Tensor, b: Tensor) -> Tensor:
    """A^-1 b for A [..., d, d] and b [..., d]; NaN where A is singular, which costs no neighbour
    its answer.

    Large matrices, and all on a CPU, one after the other: a GPU's batched routines are made for
    small ones, and with several of more than some hundred rows, on more than one thread, torch 2.13
    fails in its LU factorisation on a CPU.
    """
    if A.dim() > 2 and (A.is_cpu or A.shape[-1] > 512):
        parts = [solve(one, v) for one, v in zip(A.flatten(0, -3), b.flatten(0, -2), strict=True)]
        return torch.stack(parts).view(b.shape)
    z, failed = torch.linalg.solve_ex(A, b.unsqueeze(-1))
    return torch.where(failed.unsqueeze(-1) == 0, z.squeeze(-1), torch.nan)
