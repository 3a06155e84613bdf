"""A metric for the weights of a model, learned from gradients: one small matrix for each side.

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
hardly matter; K makes them longer. `algorithms/layers.py` tells which gradients these are.

With powers of -1/4 it would be the metric of Shampoo (Gupta, Koren and Singer, ICML 2018), and with
a single gradient G = U S V^T then K G = c U V^T, which is the step of Muon. A and C belong to one
matrix, so that K costs products with small matrices, and not with one of d x d.

All functions take batches: vectors are [trials, d]. Means are in float64, all that is made of them
is as accurate as the run's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
Spectrum = tuple[Tensor, Tensor | None]
"""Eigenvalues [trials, n] in float64, not negative; vectors [trials, n, n], none of a diagonal."""


class Side(NamedTuple):
    """A or C to half of its power in K."""

    vectors: Tensor | None  # eigenvectors, [trials, n, n]; none of a diagonal
    powers: Tensor  # of the eigenvalues, [trials, n]

    def stretch(self, G: Tensor) -> Tensor:
        """It times G [trials, n, m]."""
        return self._multiply(self.powers, G)

    def shrink(self, G: Tensor) -> Tensor:
        """One over it times G [trials, n, m]."""
        return self._multiply(self.powers.reciprocal(), G)

    def _multiply(self, powers: Tensor, G: Tensor) -> Tensor:
        if self.vectors is None:
            return powers[..., None] * G
        return self.vectors @ (powers[..., None] * (self.vectors.mT @ G))


class Metric(NamedTuple):
    """K, as a product of two equal factors K^(1/2)."""

    matrices: tuple[Matrix, ...]
    sides: tuple[Side, ...]  # of A and C of each matrix
    root: Tensor  # c^(1/2), [trials, 1]

    def stretch(self, v: Tensor) -> Tensor:
        """K^(1/2) v, for v [trials, d]."""
        return self._on_both_sides(Side.stretch, v).mul_(self.root.to(v.dtype))

    def shrink(self, v: Tensor) -> Tensor:
        """K^(-1/2) v, for v [trials, d]."""
        return self._on_both_sides(Side.shrink, v).div_(self.root.to(v.dtype))

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

    def _on_both_sides(self, times: Callable[[Side, Tensor], Tensor], v: Tensor) -> Tensor:
        """Each matrix of v between what belongs to its A and C."""
        parts = []
        pairs = zip(self.sides[::2], self.sides[1::2], strict=True)
        for G, (A, C) in zip(split(v, self.matrices), pairs, strict=True):
            H = times(A, G)
            H = times(C, H.mT).mT
            parts.append(H.flatten(-2))
        return torch.cat(parts, -1)


def split(v: Tensor, matrices: Sequence[Matrix]) -> list[Tensor]:
    """The matrices [..., rows, cols] of a vector [..., d]."""
    parts = v.split_with_sizes([rows * cols for rows, cols in matrices], -1)
    return [p.reshape(*v.shape[:-1], *shape) for p, shape in zip(parts, matrices, strict=True)]


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
    return blend(moments, squares(g, matrices), share)


def blend(moments: Moments, newest: Moments, share: float) -> Moments:
    """The means with new squares, which count with a share between 0 and 1."""
    return tuple(torch.lerp(a, b, share) for a, b in zip(moments, newest, strict=True))


def squares(g: Tensor, matrices: Sequence[Matrix]) -> Moments:
    """G G^T and G^T G of each matrix of a gradient g [trials, d]."""
    return tuple(_square(side) for G in split(g, matrices) for side in (G, G.mT))


def mean_squares(weights: Tensor, G: Tensor) -> Moments:
    """The weighted means of G G^T and G^T G over many matrices G [M, trials, n, m]; weights [M].

    The matrices are put side by side, so that no square of a single one is kept.
    """
    roots = weights.to(G.device, torch.float64).sqrt()
    scaled = G * roots[:, None, None, None]  # in float64
    of_rows = _square(scaled.movedim(0, -2).flatten(-2))  # of [trials, n, M m]
    of_columns = _square(scaled.mT.movedim(0, -2).flatten(-2))  # of [trials, m, M n]
    return of_rows, of_columns


def metric(
    moments: Moments,
    matrices: Sequence[Matrix],
    g: Tensor,
    floor: float | Tensor,
) -> Metric:
    """K of the means, scaled by the newest gradient g [trials, d].

    `floor` is a number, or one for each trial, [trials, 1]. Where the means are those of the first
    matrix alone, all others are vectors with a number for each of its rows. They have its A, and in
    place of C the mean of its C's eigenvalues: each is one more column, of usual size.
    """
    spectra = [_eigen(mean, g.dtype) for mean in moments]
    if len(spectra) < 2 * len(matrices):
        spectra += _columns(*spectra) * (len(matrices) - 1)
    tops = [values.amax(-1, keepdim=True) for values, _ in spectra]
    top = torch.stack(tops).amax(0)
    added = torch.where(top > 0, floor * top, 1.0)  # K = I where all gradients were 0
    sides = []
    for values, vectors in spectra:
        powers = (values + added) ** (POWER / 2)
        sides.append(Side(vectors, powers.to(g.dtype)))
    unscaled = Metric(tuple(matrices), tuple(sides), torch.ones_like(top))
    fall = unscaled.fall(g)
    c = torch.where(fall > 0, norm(g) ** 2 / fall, 1.0)
    return unscaled._replace(root=c.sqrt())


def _columns(A: Spectrum, C: Spectrum) -> list[Spectrum]:
    """The sides of a vector that is one more column, of usual size, of a matrix with A and C."""
    return [A, (C[0].mean(-1, keepdim=True), None)]


def _square(G: Tensor) -> Tensor:
    """G G^T in float64, or its diagonal where it has many rows; G is [trials, n, m]."""
    G = G.double()  # squares of float32 may be too large or too small for it
    return (G**2).sum(-1) if G.shape[-2] > LARGEST else G @ G.mT


def _eigen(mean: Tensor, dtype: torch.dtype) -> Spectrum:
    """Of A or C, as accurate as a dtype; no number where it is not finite."""
    if mean.dim() == 2:
        return mean, None
    if mean.shape[-1] == 1:
        return mean[..., 0], None
    finite = mean.isfinite().all(-1).all(-1)[:, None, None]
    known = torch.where(finite, mean, 0.0)  # eigh refuses what is not finite
    size = known.abs().amax((-2, -1), keepdim=True)
    scaled = known / torch.where(size > 0, size, 1.0)  # or float32 could not hold it
    if mean.is_cuda and mean.shape[-1] >= ONE_BY_ONE:
        one_by_one = [torch.linalg.eigh(one) for one in scaled]
        values = torch.stack([one.eigenvalues for one in one_by_one])
        vectors = torch.stack([one.eigenvectors for one in one_by_one])
    else:
        values, vectors = _eigh(scaled, mean.dtype if mean.is_cuda else dtype)
    values = values.double().clamp(min=0) * size[..., 0]
    return torch.where(finite[..., 0], values, torch.nan), vectors.to(dtype)


def _eigh(exact: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """In a dtype, as float32 takes half the time on a CPU; exactly where that does not converge."""
    try:
        values, vectors = torch.linalg.eigh(exact.to(dtype))
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        values, vectors = torch.linalg.eigh(exact)
    return values, vectors
