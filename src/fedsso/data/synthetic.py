"""Synthetic federations whose exact minimiser is known, in float64.

quadratic
    Client i minimises f_i(x) = 1/2 (x - b_i)^T A_i (x - b_i), where the eigenvalues of A_i lie in
    [1/condition, 1]. It is written as a least-squares problem for model "linear" and loss "mse":
    with A = L L^T, the rows are a_j = sqrt(d/2) (L^T)_j and the targets are a_j^T b.

logistic
    Rows lie around a centre of the client's own. Labels 0 and 1 are drawn from a logistic model of
    the client's own, and some are flipped. It is for model "linear" and loss "bce", and its
    minimiser is found by Newton's method.

heterogeneity says how much the clients differ. 0 makes them all alike: the same A and b, or rows
from one distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from ..errors import InputError
from ..support.rng import generator
from .arrays import client_weights, dense
from .federation import Federation
from .options import (
    CLIENTS,
    CONDITION,
    DIM,
    HETEROGENEITY,
    LOGISTIC_ROWS,
    NOISE,
    TEST_FRACTION,
    Option,
)

F64 = torch.float64
LARGEST = 2**28
"""The most numbers in x: 2 GiB, of which a few copies are in memory while it is made."""
TOLERANCE = 1e-12
"""How small the gradient must be at a minimiser."""


# ---- quadratic ----


def quadratic(A: Any, b: Any, p: Any = None) -> Federation:
    """Build the federation of f_i(x) = 1/2 (x - b_i)^T A_i (x - b_i).

    The clients are tested on their training rows, because there are no others.

    Args:
        A: The clients' matrices, [N, d, d], symmetric and positive definite.
        b: The clients' own minimisers, [N, d].
        p: The client weights, summing to 1. All equal when left out.

    Returns:
        A federation whose `optimum` is the exact minimiser of p_1 f_1 + ... + p_N f_N.

    >>> fed = quadratic([[[1.0]], [[1.0]]], [[0.0], [2.0]])
    >>> fed.optimum
    tensor([1.], dtype=torch.float64)
    """
    A = dense(A, "A").double()
    b = dense(b, "b").double()
    if A.ndim != 3 or A.shape != (*b.shape, A.shape[1]):
        shapes = f"{tuple(A.shape)} and {tuple(b.shape)}"
        raise InputError(f"need A [N, d, d] and b [N, d], got shapes {shapes}")
    clients, d = b.shape
    L, failed = torch.linalg.cholesky_ex(A)
    if failed.any() or not torch.allclose(A, A.mT):
        raise InputError("every A_i must be symmetric and positive definite")
    a = (d / 2) ** 0.5 * L.mT
    targets = (a @ b[:, :, None]).squeeze(-1)
    pairs = list(zip(a, targets, strict=True))
    fed = Federation.from_clients(pairs, test_fraction=0)
    fed = replace(
        fed,
        test_rows=fed.train_rows,
        test_start=fed.train_start,
        weights=client_weights(p, clients),
    )
    # The gradient of sum p_i f_i is zero where (sum p_i A_i) x = sum p_i A_i b_i.
    pA = fed.p[:, None, None] * A
    pAb = torch.einsum("nij,nj->i", pA, b)
    optimum = torch.linalg.solve(pA.sum(0), pAb)
    return replace(fed, name="quadratic", optimum=optimum)


def random_quadratic(
    clients: int,
    seed: int,
    *,
    dim: int = DIM.default,
    heterogeneity: float = HETEROGENEITY.default,
    condition: float = CONDITION.default,
) -> Federation:
    """Draw a quadratic for each client. All share a part of A and b.

    Args:
        clients: The number of clients, N.
        seed: The seed of all draws.
        dim: The number of variables, d.
        heterogeneity: The weight of the part that is the client's own. 0: all clients are alike.
        condition: The condition number of each of the two parts of A.
    """
    _check_size(clients, dim, dim, heterogeneity)
    CONDITION.check(condition)
    common = _positive_definite(1, dim, condition, seed, "common")
    own = _positive_definite(clients, dim, condition, seed, "own")
    A = (common + heterogeneity * own) / (1 + heterogeneity)
    common_b = _normal((1, dim), seed, "b")
    own_b = _normal((clients, dim), seed, "b own")
    b = common_b + heterogeneity * own_b
    return quadratic(A, b)


def _positive_definite(
    n: int,
    dim: int,
    condition: float,
    seed: int,
    purpose: str,
) -> Tensor:
    """Draw n matrices whose eigenvalues are spread evenly, in logarithm, over [1/condition, 1]."""
    gaussian = _normal((n, dim, dim), seed, f"A {purpose}")
    Q = torch.linalg.qr(gaussian).Q
    exponents = torch.linspace(0, 1, dim, dtype=F64)
    eigenvalues = condition**-exponents
    A: Tensor = Q * eigenvalues @ Q.mT
    return A


# ---- logistic ----


def random_logistic(
    clients: int,
    seed: int,
    *,
    dim: int = DIM.default,
    heterogeneity: float = HETEROGENEITY.default,
    rows: int = LOGISTIC_ROWS.default,
    noise: float = NOISE.default,
    test_fraction: float = TEST_FRACTION.default,
) -> Federation:
    """Draw a logistic regression for each client, with `rows` rows and noisy labels.

    Args:
        clients: The number of clients, N.
        seed: The seed of all draws.
        dim: The number of variables, d.
        heterogeneity: How far the clients' models and the centres of their rows lie apart.
        rows: The rows of each client, training and test rows together.
        noise: The share of the labels that are flipped, so that no hyperplane separates the two
            classes and the minimiser is finite.
        test_fraction: The share of each client's rows that is kept for testing.
    """
    LOGISTIC_ROWS.check(rows)
    NOISE.check(noise)
    _check_size(clients, rows, dim, heterogeneity)
    common_w = _normal((1, dim), seed, "w")
    own_w = _normal((clients, dim), seed, "w own")
    w = (common_w + heterogeneity * own_w) / dim**0.5
    around_zero = _normal((clients, rows, dim), seed, "x")
    centre = _normal((clients, 1, dim), seed, "centre")
    x = around_zero + heterogeneity * centre
    draw = generator(seed, "synthetic", "label")
    u = torch.rand((2, clients, rows), generator=draw, dtype=F64)
    probability = torch.sigmoid((x @ w[:, :, None]).squeeze(-1))
    label = (u[0] < probability) ^ (u[1] < noise)
    pairs = list(zip(x, label.to(F64), strict=True))
    fed = Federation.from_clients(pairs, test_fraction=test_fraction, seed=seed)
    train = fed.train_rows
    optimum = _logistic_optimum(fed.x[train], fed.y[train])
    return replace(fed, optimum=optimum)


def _logistic_optimum(x: Tensor, y: Tensor) -> Tensor:
    """Minimise the mean logistic loss by Newton's method, with halved steps where it would rise."""
    w = x.new_zeros(x.shape[1])
    for _ in range(100):
        s = torch.sigmoid(x @ w)
        g = x.mT @ (s - y) / len(x)
        if g.norm() <= TOLERANCE:
            break
        H = (x * (s * (1 - s))[:, None]).mT @ x / len(x)
        step = torch.linalg.lstsq(H, g[:, None]).solution[:, 0]
        while _logistic_loss(w - step, x, y) > _logistic_loss(w, x, y) + 1e-15:
            step = step / 2
        w = w - step
    separated = ((x @ w > 0) == (y > 0)).all()
    if g.norm() > TOLERANCE or separated:
        rows, dim = x.shape
        raise InputError(
            f"the logistic problem has no finite minimiser: {rows} rows in {dim} dimensions can be "
            "separated; use more rows or more noise"
        )
    return w


def _logistic_loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The mean logistic loss of the model w."""
    return binary_cross_entropy_with_logits(x @ w, y)


# ---- the registry ----

KINDS: dict[str, Callable[..., Federation]] = {
    "quadratic": random_quadratic,
    "logistic": random_logistic,
}
"""The problems by name."""

OPTIONS_OF_KIND: dict[str, tuple[Option, ...]] = {
    "quadratic": (DIM, HETEROGENEITY, CONDITION),
    "logistic": (DIM, HETEROGENEITY, LOGISTIC_ROWS, NOISE, TEST_FRACTION),
}
"""The options of each problem."""

KIND = Option(
    "kind",
    str,
    "quadratic",
    "Which problem to draw.",
    choices=tuple(KINDS),
    also=("problem", "type", "loss"),
)

SYNTHETIC_OPTIONS = (KIND, DIM, HETEROGENEITY, CONDITION, LOGISTIC_ROWS, NOISE)
"""The options of all problems together."""


# ---- both ----


def _check_size(
    clients: int,
    rows: int,
    dim: int,
    heterogeneity: float,
) -> None:
    """Raise InputError for a wrong option, or a problem that would not fit into memory."""
    CLIENTS.check(clients)
    DIM.check(dim)
    HETEROGENEITY.check(heterogeneity)
    numbers = clients * rows * dim
    if numbers > LARGEST:
        raise InputError(
            f"got clients={clients}, dim={dim}, heterogeneity={heterogeneity}: {rows} rows each "
            f"make {numbers} numbers, need at most {LARGEST}"
        )


def _normal(shape: tuple[int, ...], seed: int, purpose: str) -> Tensor:
    """Standard normal numbers in float64, which depend on the seed and the purpose alone."""
    draw = generator(seed, "synthetic", purpose)
    return torch.randn(shape, generator=draw, dtype=F64)
