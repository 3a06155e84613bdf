"""Symmetric matrices: what is sent instead of one, and solves that answer NaN instead of stopping.

A client that sends its Hessian X [..., d, d] sends the lower triangle, n = d (d + 1) / 2 numbers
packed row by row, or less. The server makes C(X) of it. |X| is the Frobenius norm.

    text         what is sent of X                          what is known of C(X)
    none         the packed triangle                        C(X) = X
    rank:R       R eigenvalues, R eigenvectors              |C(X) - X|^2 <= (1 - R/d) |X|^2
    topk:K       K entries of the triangle, their places    |C(X) - X|^2 <= (1 - K/n) |X|^2
    powersgd:R   P and X P, for P an orthonormal basis      |C(X) - X| <= |X|, and the less the
                 of X G with G [d, R] Gaussian              faster the eigenvalues of X decay
    randk:K      K random entries times n/K, their places   the mean is X, the variance at most
                                                            (n/K - 1) |X|^2

K below 1 is a share of n. Top-K ranks entries by their part in |X|: one off the diagonal stands for
two, so it counts sqrt(2) times its size. Parts are rounded to multiples of `TIE` eps times the
largest one, so that errors of rounding do not rank them; of equal ones any may be sent. So Top-K
keeps its bound up to a factor 1 + 2 TIE eps K/n, in float32 1 + 2.4e-4 K/n. PowerSGD's P (X P)^T is
not symmetric. Its symmetric part is decoded: this is the orthogonal projection onto the symmetric
matrices, where X lies, so it is no farther from X.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..support import linalg

LARGEST = 20_000  # rows of a matrix
SMALL = 64  # rows of a matrix that is always decomposed as a whole
MIDDLE = 300  # rows up to which a few powers take less time than a Krylov space
SPARE = 7  # vectors beyond R that are multiplied along, so that the first R come out well
POWERS = 4  # how often these are multiplied by X
GROWTH = 16  # a Krylov space has 16 (R + 1) dimensions, where that is less than half of all
TIE = 1e3  # eigenvalues that differ by so many units in the last place of the largest are equal


def check_size(x: Tensor) -> None:
    """Refuse a model x [..., d] for which a matrix d x d is out of reach."""
    d = x.shape[-1]
    if d > LARGEST:
        size = d * d * x.element_size() / 1e9
        raise InputError(
            f"{d} parameters need {d} x {d} matrices, {size:.3g} GB at the server and at every "
            f"client; at most {LARGEST} parameters are possible: use fedsso, which needs no "
            "matrix, or a smaller model"
        )


# ---- linear algebra that lets one trial fail without its neighbours ----


def shift(X: Tensor, l: float | Tensor) -> Tensor:
    """X + l I as a new matrix, for a number or l [..., 1]."""
    out = X.clone()
    diagonal = out.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(torch.as_tensor(l, dtype=X.dtype, device=X.device))
    return out


def solve(X: Tensor, b: Tensor) -> Tensor:
    """X^-1 b in float64, for b [..., d]; NaN where X is singular.

    A trial that has diverged must not end those that are computed with it.
    """
    return linalg.solve(X.double(), b.double())


def eigh(X: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues [..., d], ascending, and eigenvectors [..., d, d] in float64.

    Where X is not finite they are NaN and the identity.
    """
    sane = X.isfinite().flatten(-2).all(-1)[..., None]
    finite = torch.where(sane[..., None], X.double(), 0.0)
    values, vectors = torch.linalg.eigh(finite)
    return torch.where(sane, values, torch.nan), vectors


def leading(X: Tensor, R: int) -> tuple[Tensor, Tensor]:
    """The R eigenvalues of largest size, [..., R], and their vectors [..., d, R].

    Those of a large matrix are found in a space of few dimensions, so they are approximate.
    Whatever the space, |X|^2 shrinks by the sum of their squares when they are taken out of X.
    """
    d = X.shape[-1]
    R = min(R, d)
    draws = torch.Generator().manual_seed(0)
    fixed = torch.randn(GROWTH * (R + 1), d, generator=draws).to(X)
    whole = d <= max(MIDDLE, 2 * len(fixed))
    wide = R + SPARE
    if SMALL < d <= MIDDLE and 4 * wide < d:
        basis = powers(X, fixed[:wide])
    elif whole:
        values, vectors = eigh(X)
        return _settle(values, vectors, fixed[:R].double(), X.dtype)
    else:
        basis = krylov(X, fixed, R)
    # The eigenvalues of X within the space: those of a matrix of a few rows.
    values, vectors = eigh(basis @ X @ basis.mT)
    inside = (fixed[:R] @ basis.mT).double()
    values, vectors = _settle(values, vectors, inside, X.dtype)
    return values, basis.mT @ vectors


def _settle(
    values: Tensor,
    vectors: Tensor,
    fixed: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The eigenvalues of largest size, one for each row of `fixed` [R, d], and their vectors.

    A softmax model with equal weights has equal eigenvalues, whose vectors are not unique. Those
    nearest to the fixed rows are taken. Else rounding would choose, which differs with the number
    of trials.
    """
    size = values.abs()
    width = TIE * torch.finfo(dtype).eps * size.amax(-1, keepdim=True)
    ranked = (size + width * (values > 0)).topk(fixed.shape[-2]).indices
    top = torch.take_along_dim(values, ranked, -1).unsqueeze(-2)
    same = (values.unsqueeze(-1) - top).abs() <= width.unsqueeze(-1)
    near = torch.where(same, vectors.mT @ fixed.mT, 0.0)
    Q = torch.linalg.qr(near).Q
    chosen = (values.unsqueeze(-1) * Q.square()).sum(-2)
    return chosen.to(dtype), (vectors @ Q).to(dtype)


def powers(X: Tensor, fixed: Tensor) -> Tensor:
    """Orthonormal rows [..., n, d] that span U X^4, for the n fixed rows U [n, d]."""
    rows = fixed.expand(*X.shape[:-2], *fixed.shape)
    for _ in range(POWERS):
        rows = rows @ X
    basis: Tensor = torch.linalg.qr(rows.mT).Q.mT
    return basis


def krylov(X: Tensor, fixed: Tensor, R: int) -> Tensor:
    """Orthonormal rows [..., n, d] that span U X, U X^2, ...

    U are the first R of n fixed rows [n, d]. This is band Lanczos with all rows reorthogonalised.
    Where the space is exhausted, it goes on with later fixed rows.
    """
    norm = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True)
    least = 1e2 * torch.finfo(X.dtype).eps * norm
    basis = X.new_zeros(*X.shape[:-2], *fixed.shape)
    for j in range(len(fixed)):
        row = fixed[j].expand_as(basis[..., :1, :])
        before = basis[..., :j, :]
        last = row if j < R else basis[..., j - R : j - R + 1, :]
        q, size = _orthogonal_part(last @ X, before)
        if X.is_meta or not (size > least).all():
            other, _ = _orthogonal_part(row, before)
            q = torch.where(size > least, q, other)
        basis[..., j : j + 1, :] = q
    return basis


def _orthogonal_part(row: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """The part of a row [..., 1, d] that is orthogonal to the basis [..., j, d].

    Returns it at length 1, and its length before; NaN where nothing is left of it.
    """
    for _ in range(2):  # once leaves rounding behind
        row = row - row @ basis.mT @ basis
    size = torch.linalg.vector_norm(row, dim=-1, keepdim=True)
    return row / size, size


# ---- what is sent ----


def pack(X: Tensor) -> Tensor:
    """The lower triangle, [..., n]."""
    d = X.shape[-1]
    i, j = _places(d, X)
    return X.flatten(-2).index_select(-1, i * d + j)


def unpack(packed: Tensor, d: int) -> Tensor:
    """The symmetric matrix [..., d, d] of a packed triangle."""
    i, j = _places(d, packed)
    X = packed.new_zeros(*packed.shape[:-1], d, d)
    X[..., i, j] = packed
    X[..., j, i] = packed
    return X


def _places(d: int, like: Tensor) -> Tensor:
    """Rows and columns [2, n] of the triangle.

    On the meta device they hold no numbers: torch would load a compiler to make them (2 s).
    """
    if like.is_meta:
        return torch.empty(2, entries(d), dtype=torch.int64, device=like.device)
    return torch.tril_indices(d, d, device=like.device)


class Packed(NamedTuple):
    """A whole matrix."""

    triangle: Tensor  # [..., n]

    def dense(self, d: int) -> Tensor:
        """The matrix [..., d, d]."""
        return unpack(self.triangle, d)


class Eigen(NamedTuple):
    """A matrix of low rank."""

    values: Tensor  # [..., R]
    vectors: Tensor  # [..., d, R]

    def dense(self, d: int) -> Tensor:  # noqa: ARG002
        """The matrix [..., d, d]."""
        return (self.vectors * self.values.unsqueeze(-2)) @ self.vectors.mT


class Sparse(NamedTuple):
    """Single entries of the triangle."""

    values: Tensor  # [..., K]
    places: Tensor  # [..., K] of 0 .. n - 1, int32

    def dense(self, d: int) -> Tensor:
        """The matrix [..., d, d]."""
        i, j = _places(d, self.values)
        places = self.places.long()
        X = self.values.new_zeros(*self.values.shape[:-1], d * d)
        for table in (i * d + j, j * d + i):
            # index_select refuses places below 0, which a client may send
            at = table.index_select(0, places.flatten()).view_as(places)
            X.scatter_(-1, at, self.values)
        return X.view(*X.shape[:-1], d, d)


class Factors(NamedTuple):
    """The symmetric part of P Q^T."""

    P: Tensor  # [..., d, R]
    Q: Tensor  # [..., d, R]

    def dense(self, d: int) -> Tensor:  # noqa: ARG002
        """The matrix [..., d, d]."""
        X = self.P @ self.Q.mT
        return (X + X.mT) / 2


Sent = Packed | Eigen | Sparse | Factors


def entries(d: int) -> int:
    """n, the entries of a triangle."""
    return d * (d + 1) // 2


# ---- compressors ----


@dataclass(frozen=True)
class Compressor:
    """A way to send X [M, trials, d, d].

    What it sends knows how to become a matrix again: `dense(d)`. `size` is the R or K of its
    text, a share of the triangle if below 1.
    """

    size: float = 0  # R or K

    def draws(self, d: int) -> int:  # noqa: ARG002
        """How many uniform numbers it takes for each client."""
        return 0

    def rate(self, d: int) -> float:  # noqa: ARG002
        """The share of C(X) by which an estimate of X should move.

        It is 1, or 1/(1 + omega) if C has the variance omega.
        """
        return 1.0

    def encode(self, X: Tensor, u: Tensor) -> Sent:
        """What is sent of X, given u [M, draws]."""
        raise NotImplementedError(f"{type(self).__name__} needs encode")

    def count(self, d: int) -> int:
        """K for d parameters: as given, or as its share of the n entries; at least 1."""
        n = entries(d)
        if self.size < 1:
            return max(1, round(self.size * n))
        return min(int(self.size), n)


class Whole(Compressor):
    """none: the packed triangle."""

    def encode(self, X: Tensor, u: Tensor) -> Packed:  # noqa: ARG002
        return Packed(pack(X))


class Rank(Compressor):
    """rank:R: the leading eigenvalues and their vectors."""

    def encode(self, X: Tensor, u: Tensor) -> Eigen:  # noqa: ARG002
        return Eigen(*leading(X, int(self.size)))


class TopK(Compressor):
    """topk:K: the entries with the largest part in |X|."""

    def encode(self, X: Tensor, u: Tensor) -> Sparse:  # noqa: ARG002
        """Entries rank by their part in |X|; those off the diagonal stand for two."""
        d = X.shape[-1]
        packed = pack(X)
        i, j = _places(d, X)
        part = packed.abs() * torch.where(i == j, 1.0, 2**0.5).to(X.dtype)
        # parts that are equal up to rounding count as equal
        width = TIE * torch.finfo(X.dtype).eps * part.amax(-1, keepdim=True)
        places = (part / width).round().topk(self.count(d), sorted=False).indices
        return Sparse(packed.gather(-1, places), places.int())


class PowerSGD(Compressor):
    """powersgd:R: two factors, by one step of the power method from random columns."""

    def draws(self, d: int) -> int:
        """The entries of G [d, R], which become normal numbers."""
        return d * min(int(self.size), d)

    def encode(self, X: Tensor, u: Tensor) -> Factors:
        """P is an orthonormal basis of X G, and Q = X P."""
        d = X.shape[-1]
        G = torch.special.ndtri(u).to(X.dtype).view(-1, 1, d, u.shape[-1] // d)
        P = torch.linalg.qr(X @ G).Q
        return Factors(P, X @ P)


class RandK(Compressor):
    """randk:K: random entries, scaled so that their mean is X."""

    def draws(self, d: int) -> int:
        return entries(d)

    def rate(self, d: int) -> float:
        """1/(omega + 1) = K/n, since the variance is omega = n/K - 1."""
        return self.count(d) / entries(d)

    def encode(self, X: Tensor, u: Tensor) -> Sparse:
        """The K entries with the largest of n uniform numbers, times n/K.

        All trials of a client send the same places.
        """
        d = X.shape[-1]
        drawn = u.topk(self.count(d)).indices
        places = drawn.unsqueeze(-2).expand(*X.shape[:-2], -1)
        values = pack(X).gather(-1, places) / self.rate(d)
        return Sparse(values, places.int())


KINDS: dict[str, type[Compressor]] = {
    "rank": Rank,
    "powersgd": PowerSGD,
    "topk": TopK,
    "randk": RandK,
}


def parse(text: Any) -> Compressor:
    """The compressor of a text such as "rank:1".

    Raises:
        InputError: The text names no compressor, or R or K is not allowed.

    >>> parse("topk:0.5").count(3)
    3
    """
    kind, _, size = str(text).partition(":")
    if text == "none":
        return Whole()
    number = _size(kind, size)
    if kind in KINDS and number is not None:
        return KINDS[kind](number)
    raise InputError(
        f"unknown compressor {text!r}; use none, rank:R or powersgd:R with an integer R >= 1, or "
        "topk:K or randk:K with an integer K >= 1 or a share 0 < K < 1 of the triangle"
    )


def _size(kind: str, text: str) -> float | None:
    """R or K as a number; None where it is not one that this kind of compressor takes."""
    try:
        number = float(text)
    except ValueError:
        return None
    if kind in ("topk", "randk") and 0 < number < 1:
        return number
    whole = text.isdecimal() and len(text) < 10
    return number if whole and number >= 1 else None
