"""A metric for the weights of a network, learned from gradients: one small matrix for each side.

A model's parameters are matrices [rows, cols], one for each weight; a vector counts as a matrix
with one column. For the matrix G of a gradient the metric is

    K G = c A^(-1/3) G C^(-1/3)

=========  =========================================================================================
A, C       means of G G^T [rows, rows] and of G^T G [cols, cols], where newer gradients count more
c          one number for the whole model, so that g^T K g = g^T g for the newest gradient g
floor      what is added to the eigenvalues of A and of C, as a share of the largest one of all
LARGEST    of a side with more rows or columns only the diagonal is kept
=========  =========================================================================================

Directions in which gradients have been small are those in which the loss is flat, or the weights
hardly matter; K makes them longer. With powers of -1/4 it would be the metric of Shampoo (Gupta,
Koren and Singer, ICML 2018), and with a single gradient G = U S V^T then K G = c U V^T, which is
the step of Muon. A and C belong to one matrix, so that K costs products with small matrices, and
not with one of d x d.

All functions take batches: vectors are [trials, d]. Means and eigenvalues are in float64, products
with vectors in the run's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..support.linalg import gram, norm

POWER = -1 / 3  # of A and of C in K
LARGEST = 1024  # rows or columns beyond which a side keeps its diagonal alone
ONE_BY_ONE = 256  # rows from which on a GPU takes the matrices of a batch one after the other
Matrix = tuple[int, int]  # rows and cols
Moments = tuple[Tensor, ...]
"""A and C of each matrix, [trials, n, n] or diagonals [trials, n], up to a common factor."""


class Side(NamedTuple):
    """A or C to half of its power in K, and one over it; [trials, n, n], or diagonals."""

    stretching: Tensor
    shrinking: Tensor


class Metric(NamedTuple):
    """K, as a product of two equal factors K^(1/2)."""

    matrices: tuple[Matrix, ...]
    sides: tuple[Side, ...]  # of A and C of each matrix
    root: Tensor  # c^(1/2), [trials, 1]

    def stretch(self, v: Tensor) -> Tensor:
        """K^(1/2) v, for v [trials, d]."""
        powers = [side.stretching for side in self.sides]
        return self._on_both_sides(v, powers).mul_(self.root.to(v.dtype))

    def shrink(self, v: Tensor) -> Tensor:
        """K^(-1/2) v, for v [trials, d]."""
        powers = [side.shrinking for side in self.sides]
        return self._on_both_sides(v, powers).div_(self.root.to(v.dtype))

    def apply(self, v: Tensor) -> Tensor:
        """K v, for v [trials, d]."""
        return self.stretch(self.stretch(v))

    def gram(self, s: Tensor, y: Tensor, g: Tensor) -> Tensor:
        """The inner products of K^(-1/2) s, K^(1/2) y and K^(1/2) g, [trials, 3, 3] in float64.

        These are s, y and g in coordinates in which K is the identity. Those of s with y and g are
        the same in all coordinates.
        """
        return gram(self.shrink(s), self.stretch(y), self.stretch(g))

    def fall(self, g: Tensor) -> Tensor:
        """g^T K g, [trials, 1] in float64, for g [trials, d]."""
        return norm(self.stretch(g)) ** 2

    def square(self, step: Tensor) -> Tensor:
        """The square of a step's length in these coordinates, [trials, 1] in float64."""
        return norm(self.shrink(step)) ** 2

    def _on_both_sides(self, v: Tensor, powers: Sequence[Tensor]) -> Tensor:
        """Each matrix of v between the powers of its A and C."""
        parts = []
        pairs = zip(powers[::2], powers[1::2], strict=True)
        for G, (left, right) in zip(split(v, self.matrices), pairs, strict=True):
            H = _from_left(left, G)
            H = _from_left(right, H.mT).mT
            parts.append(H.flatten(-2))
        return torch.cat(parts, -1)


def split(v: Tensor, matrices: Sequence[Matrix]) -> list[Tensor]:
    """The matrices [trials, rows, cols] of a vector [trials, d]."""
    parts = v.split_with_sizes([rows * cols for rows, cols in matrices], -1)
    return [part.reshape(-1, *shape) for part, shape in zip(parts, matrices, strict=True)]


def numbers(matrices: Sequence[Matrix]) -> int:
    """How many numbers the means of one trial are."""
    return sum(prod(shape) for shape in _shapes(matrices))


def _shapes(matrices: Sequence[Matrix]) -> list[tuple[int, ...]]:
    """Of A and C of each matrix, or of their diagonals."""
    sides = [n for shape in matrices for n in shape]
    return [(n,) if n > LARGEST else (n, n) for n in sides]


def start(x: Tensor, matrices: Sequence[Matrix]) -> Moments:
    """No gradient yet, for models x [trials, d]."""
    trials = x.shape[0]
    shapes = _shapes(matrices)
    return tuple(x.new_zeros(trials, *shape, dtype=torch.float64) for shape in shapes)


def follow(
    moments: Moments,
    g: Tensor,
    matrices: Sequence[Matrix],
    share: float,
) -> Moments:
    """The means with a new gradient g [trials, d], which counts with a share between 0 and 1."""
    squares: list[Tensor] = []
    for G in split(g, matrices):
        squares.append(_square(G))
        squares.append(_square(G.mT))
    return tuple(torch.lerp(a, b, share) for a, b in zip(moments, squares, strict=True))


def metric(
    moments: Moments,
    matrices: Sequence[Matrix],
    g: Tensor,
    floor: float,
) -> Metric:
    """K of the means, scaled by the newest gradient g [trials, d] that they have followed."""
    spectra = [_eigen(mean) for mean in moments]
    tops = [values.amax(-1, keepdim=True) for values, _ in spectra]
    top = torch.stack(tops).amax(0)
    added = torch.where(top > 0, floor * top, 1.0)  # K = I where all gradients were 0
    sides = []
    for values, vectors in spectra:
        halves = [_power(values + added, vectors, sign * POWER / 2) for sign in (1, -1)]
        sides.append(Side(*[half.to(g.dtype) for half in halves]))
    unscaled = Metric(tuple(matrices), tuple(sides), torch.ones_like(top))
    fall = unscaled.fall(g)
    c = torch.where(fall > 0, norm(g) ** 2 / fall, 1.0)
    return unscaled._replace(root=c.sqrt())


def _square(G: Tensor) -> Tensor:
    """G G^T in float64, or its diagonal where it has many rows; G is [trials, n, m]."""
    G = G.double()  # squares of float32 may be too large or too small for it
    return (G**2).sum(-1) if G.shape[-2] > LARGEST else G @ G.mT


def _eigen(mean: Tensor) -> tuple[Tensor, Tensor | None]:
    """Eigenvalues [trials, n], not negative, and vectors [trials, n, n]; none of a diagonal."""
    if mean.dim() == 2:
        return mean, None
    if mean.shape[-1] == 1:
        return mean[..., 0], torch.ones_like(mean)
    finite = mean.isfinite().all(-1).all(-1)[:, None, None]
    known = torch.where(finite, mean, 0.0)  # eigh refuses what is not finite
    if mean.is_cuda and mean.shape[-1] >= ONE_BY_ONE:
        one_by_one = [torch.linalg.eigh(one) for one in known]
        values = torch.stack([one.eigenvalues for one in one_by_one])
        vectors = torch.stack([one.eigenvectors for one in one_by_one])
    else:
        values, vectors = torch.linalg.eigh(known)
    return torch.where(finite[..., 0], values.clamp(min=0), torch.nan), vectors


def _power(values: Tensor, vectors: Tensor | None, exponent: float) -> Tensor:
    """The matrix with these eigenvalues to a power, or the diagonal."""
    powers = values**exponent
    if vectors is None:
        return powers
    return (vectors * powers[..., None, :]) @ vectors.mT


def _from_left(side: Tensor, G: Tensor) -> Tensor:
    """A matrix, or a diagonal, times G [trials, n, m]."""
    return side @ G if side.dim() == 3 else side[..., None] * G
