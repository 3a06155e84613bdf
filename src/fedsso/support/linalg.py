"""Inner products, lengths and solutions of linear systems that keep their digits.

Vectors may be float32, but sums over millions of products need more precision than that. So inner
products are computed in float64. All functions take batches: the leading axes "..." are those of
clients or trials, and d is the number of parameters.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

CACHED = 1 << 18
"""How many numbers are widened to float64 at a time, so that they stay in the processor's cache."""


def gram(*vectors: Tensor) -> Tensor:
    """All inner products of n vectors [..., d], in float64: [..., n, n].

    On a CPU the vectors are widened block by block. On a GPU one block holds them all.

    >>> gram(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    tensor([[ 5., 11.],
            [11., 25.]], dtype=torch.float64)
    """
    first = vectors[0]
    n = len(vectors)
    *lead, d = first.shape
    width = d
    if first.is_cpu:
        vectors_in_all = max(1, n * prod(lead))
        fitting = CACHED // vectors_in_all
        width = min(d, max(1024, fitting))
    alike = all(v.shape == first.shape for v in vectors)
    if width == d and alike:  # one block, without a buffer for it
        block = torch.stack(vectors, -2).double()
        return (block @ block.mT).add_(0.0)  # 0, never -0, as the sum of several blocks
    wide = first.new_empty(*lead, n, width, dtype=torch.float64)
    total = wide.new_zeros(*lead, n, n)
    for start in range(0, d, width):
        end = start + width
        block = wide[..., : d - start]
        for i, v in enumerate(vectors):
            block[..., i, :] = v[..., start:end]
        total += block @ block.mT
    return total


def dot(a: Tensor, b: Tensor) -> Tensor:
    """The inner product over the last axis, in float64: [..., 1].

    >>> dot(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    tensor([11.], dtype=torch.float64)
    """
    size = max(a.numel(), b.numel())
    if size <= CACHED:  # without blocks: a call of gram would take eight times as long
        product = a.double() * b.double()
        return product.sum(-1, keepdim=True)
    products = gram(a, b)
    return products[..., 0, 1:]


def norm(a: Tensor) -> Tensor:
    """The Euclidean length over the last axis, in float64: [..., 1].

    >>> norm(torch.tensor([3.0, 4.0]))
    tensor([5.], dtype=torch.float64)
    """
    square = gram(a)[..., 0, :]
    return square.sqrt()


def solve(A: Tensor, b: Tensor) -> Tensor:
    """Solve A z = b for A [..., d, d] and b [..., d]. Returns z [..., d].

    Where A is singular, z is NaN; the other systems of the batch still get their answers.

    On a CPU, and for large matrices everywhere, the systems are solved one after the other. A GPU's
    batched routines are made for small matrices. And on a CPU with several threads, torch 2.13
    fails in the LU factorisation of a batch of matrices with more than some hundred rows.
    """
    is_batch = A.dim() > 2
    if is_batch and (A.is_cpu or A.shape[-1] > 512):
        matrices = A.flatten(0, -3)
        vectors = b.flatten(0, -2)
        parts = [solve(one, v) for one, v in zip(matrices, vectors, strict=True)]
        return torch.stack(parts).view(b.shape)
    z, failed = torch.linalg.solve_ex(A, b.unsqueeze(-1))
    solved = failed.unsqueeze(-1) == 0
    return torch.where(solved, z.squeeze(-1), torch.nan)
