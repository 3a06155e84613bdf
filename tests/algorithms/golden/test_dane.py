"""DANE by hand.

Two clients, two parameters, f_i(x) = 1/2 (x - b_i)^T A_i (x - b_i):

    A_1 = diag(1, 2), b_1 = (1, 0), p_1 = 1/4        A_2 = diag(3, 1), b_2 = (0, 2), p_2 = 3/4

At x_1 = 0 the gradients are (-1, 0) and (0, -2), g = (-1/4, -3/2). A client minimises
f_i(y) - <grad f_i(0) - eta g, y> + mu/2 |y|^2: (A_i + mu I) y = -eta g. With mu = 1 and eta = 1/2:

    (A_i + I)^-1 = diag(1/2, 1/3), diag(1/4, 1/2), mean diag(5/16, 11/24)
    x = (5/16 * 1/8, 11/24 * 3/4) = (0.0390625, 0.34375)

Divergence: one parameter, A = (1, 9), b = (1, 1), p = (1/2, 1/2), mu = 0. The mean inverse 5/9
times the mean 5 is 25/9, so the distance to the minimiser 1 is multiplied by -16/9 in every round;
with mu = 3 the mean inverse is 1/6, the factor 1/6.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from quadratics import OPTIONS, close, go, parts

from fedsso import Federation, InputError, simulate
from fedsso.algorithms.second_order.dane import DANE
from fedsso.algorithms.second_order.feddane import FedDANE
from fedsso.data import quadratic

EXACT: dict[str, Any] = {"newton_steps": 1, "tol": 1e-14}


def test_one_round() -> None:
    fed = quadratic([[[1, 0], [0, 2]], [[3, 0], [0, 1]]], [[1, 0], [0, 2]], [0.25, 0.75])
    result = go(fed, DANE(eta=0.5, mu=1, **EXACT), 1)
    assert result.x.tolist() == pytest.approx([0.0390625, 0.34375], abs=1e-13)
    assert result.trace["train_loss"][1] == pytest.approx(1.625, rel=1e-14)
    assert result.trace["grad_norm"][1] == pytest.approx(math.hypot(0.25, 1.5), rel=1e-14)
    assert result.trace["bytes_up"][1] == result.trace["bytes_down"][1] == 2 * 2 * 2 * 8


@pytest.mark.parametrize(("mu", "factor"), [(0, -16 / 9), (3, 1 / 6)])
def test_needs_mu_where_hessians_differ(mu: float, factor: float) -> None:
    fed = quadratic([[[1]], [[9]]], [[1], [1]])
    for k in (1, 2, 3):
        assert go(fed, DANE(mu=mu, **EXACT), k).x.item() == pytest.approx(1 - factor**k, rel=1e-11)


def test_quadratics(quad: Federation) -> None:
    """x - eta sum p_i (A_i + mu I)^-1 grad f(x)."""
    A, Ab = parts(quad)
    x, mu, eta = torch.zeros(6, dtype=torch.float64), 0.3, 0.8
    for k in range(1, 4):
        g = torch.einsum("n,ni->i", quad.p, A @ x - Ab)
        x = x - eta * quad.p @ torch.linalg.solve(
            A + mu * torch.eye(6, dtype=torch.float64), g.expand(4, 6)
        )
        close(go(quad, DANE(eta=eta, mu=mu, **EXACT), k).x, x)


def test_equal_hessians_need_one_round(quad: Federation) -> None:
    A = parts(quad)[0][:1].expand(4, 6, 6)
    fed = quadratic(A, torch.linspace(-1, 1, 24).view(4, 6), quad.p)
    assert fed.optimum is not None
    close(go(fed, DANE(mu=0, **EXACT), 1).x, fed.optimum)


def test_limit_is_the_minimiser(quad: Federation) -> None:
    assert quad.optimum is not None
    close(go(quad, DANE(mu=0.1, **EXACT), 20, eval_every=20).x, quad.optimum)


def test_is_feddane_with_all_clients(fed: Federation) -> None:
    a, b = (
        simulate(fed, "mclr", one, rounds=3, **OPTIONS)
        for one in (DANE(mu=0.2, newton_steps=2), FedDANE(mu=0.2, solver="exact", newton_steps=2))
    )
    close(a.x, b.x, 1e-12)


def test_refuses_a_part_of_the_clients(quad: Federation) -> None:
    with pytest.raises(InputError, match=r"needs all clients .* or feddane"):
        go(quad, DANE(), 1, participation=0.5)


@pytest.mark.parametrize(
    "wrong", [{"eta": 0}, {"mu": -1}, {"tol": -1}, {"newton_steps": 0}, {"cg_steps": 0}]
)
def test_wrong_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(wrong))} must be"):
        DANE(**wrong)
