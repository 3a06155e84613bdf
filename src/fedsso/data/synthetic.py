"""Synthetic federations whose minimiser is known, in float64.

quadratic: f_i(x) = 1/2 (x - b_i)^T A_i (x - b_i), eigenvalues of A_i in [1/condition, 1], as least squares
           for model "linear" and loss "mse": rows a_j = sqrt(d/2) (L^T)_j with A = L L^T, targets a_j^T b.
logistic:  rows around a centre of the client's own, labels 0/1 drawn from a logistic model of its own, some
           flipped, for model "linear" and loss "bce"; minimised by Newton's method.
heterogeneity 0 makes all clients alike: the same A and b, or rows from one distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..support.rng import generator
from .federation import Federation, client_weights, dense

F64 = torch.float64
LARGEST = 2**28  # numbers in x: 2 GiB, of which a few copies are in memory while it is made


def quadratic(A: Any, b: Any, p: Any = None) -> Federation:
    """The federation of f_i(x) = 1/2 (x - b_i)^T A_i (x - b_i), tested on its training rows.

    A [N, d, d] and b [N, d]; p are the client weights, all equal when left out.
    """
    A, b = dense(A, "A").double(), dense(b, "b").double()
    if A.ndim != 3 or A.shape != (*b.shape, A.shape[1]):
        raise InputError(
            f"need A [N, d, d] and b [N, d], got shapes {tuple(A.shape)} and {tuple(b.shape)}"
        )
    clients, d = b.shape
    L, failed = torch.linalg.cholesky_ex(A)
    if failed.any() or not torch.allclose(A, A.mT):
        raise InputError("every A_i must be symmetric and positive definite")
    a = (d / 2) ** 0.5 * L.mT
    t = (a @ b[:, :, None]).squeeze(-1)
    fed = Federation.from_clients(list(zip(a, t, strict=True)), test_fraction=0)
    fed = replace(
        fed,
        test_rows=fed.train_rows,
        test_start=fed.train_start,
        weights=client_weights(p, clients),
    )
    pA = fed.p[:, None, None] * A
    optimum = torch.linalg.solve(pA.sum(0), torch.einsum("nij,nj->i", pA, b))
    return replace(fed, name="quadratic", optimum=optimum)


def random_quadratic(
    clients: int, seed: int, *, dim: int = 20, heterogeneity: float = 1.0, condition: float = 100.0
) -> Federation:
    """Quadratics that share a part of A and b; the clients' own part weighs `heterogeneity`."""
    _check(clients, dim, dim, heterogeneity)
    if not 1 <= condition < math.inf:
        raise InputError(f"condition must be >= 1 and finite, got {condition}")
    common, own = (
        _spd(n, dim, condition, seed, who) for n, who in ((1, "common"), (clients, "own"))
    )
    A = (common + heterogeneity * own) / (1 + heterogeneity)
    b = _normal((1, dim), seed, "b") + heterogeneity * _normal((clients, dim), seed, "b own")
    return quadratic(A, b)


def random_logistic(
    clients: int,
    seed: int,
    *,
    dim: int = 20,
    heterogeneity: float = 1.0,
    rows: int = 200,
    noise: float = 0.1,
    test_fraction: float = 0.25,
) -> Federation:
    """Label-noise logistic regression: `rows` per client, a share `noise` of the labels flipped."""
    _check(clients, rows, dim, heterogeneity)
    if rows < 1 or not 0 <= noise < 0.5:
        raise InputError(f"need rows >= 1 and noise in [0, 0.5), got rows={rows}, noise={noise}")
    w = (
        _normal((1, dim), seed, "w") + heterogeneity * _normal((clients, dim), seed, "w own")
    ) / dim**0.5
    x = _normal((clients, rows, dim), seed, "x") + heterogeneity * _normal(
        (clients, 1, dim), seed, "centre"
    )
    u = torch.rand((2, clients, rows), generator=generator(seed, "synthetic", "label"), dtype=F64)
    label = (u[0] < torch.sigmoid((x @ w[:, :, None]).squeeze(-1))) ^ (u[1] < noise)
    pairs = list(zip(x, label.to(F64), strict=True))
    fed = Federation.from_clients(pairs, test_fraction=test_fraction, seed=seed)
    return replace(fed, optimum=_logistic_optimum(fed.x[fed.train_rows], fed.y[fed.train_rows]))


KINDS: dict[str, Callable[..., Federation]] = {
    "quadratic": random_quadratic,
    "logistic": random_logistic,
}


def _check(clients: int, rows: int, dim: int, heterogeneity: float) -> None:
    got = f"got clients={clients}, dim={dim}, heterogeneity={heterogeneity}"
    if clients < 1 or dim < 1 or not 0 <= heterogeneity < math.inf:
        raise InputError(f"need clients >= 1, dim >= 1 and a finite heterogeneity >= 0, {got}")
    if clients * rows * dim > LARGEST:
        raise InputError(
            f"{got}: {rows} rows each make {clients * rows * dim} numbers, need at most {LARGEST}"
        )


def _normal(shape: tuple[int, ...], seed: int, purpose: str) -> Tensor:
    return torch.randn(shape, generator=generator(seed, "synthetic", purpose), dtype=F64)


def _spd(n: int, dim: int, condition: float, seed: int, purpose: str) -> Tensor:
    """n random matrices with eigenvalues spread evenly in logarithm over [1/condition, 1]."""
    Q = torch.linalg.qr(_normal((n, dim, dim), seed, f"A {purpose}")).Q
    eigenvalues = condition ** -torch.linspace(0, 1, dim, dtype=F64)
    A: Tensor = Q * eigenvalues @ Q.mT
    return A


def _logistic_optimum(x: Tensor, y: Tensor) -> Tensor:
    """Newton's method with step halving on the mean logistic loss, to a gradient norm of 1e-12."""
    w = x.new_zeros(x.shape[1])
    for _ in range(100):
        s = torch.sigmoid(x @ w)
        g = x.mT @ (s - y) / len(x)
        if g.norm() <= 1e-12:
            break
        H = (x * (s * (1 - s))[:, None]).mT @ x / len(x)
        step = torch.linalg.lstsq(H, g[:, None]).solution[:, 0]
        while _logistic_loss(w - step, x, y) > _logistic_loss(w, x, y) + 1e-15:
            step = step / 2
        w = w - step
    if g.norm() > 1e-12 or ((x @ w > 0) == (y > 0)).all():
        raise InputError(
            f"the logistic problem has no finite minimiser: {len(x)} rows in {x.shape[1]} "
            f"dimensions "
            "can be separated; use more rows or more noise"
        )
    return w


def _logistic_loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(x @ w, y)
