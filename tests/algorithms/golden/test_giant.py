"""GIANT by hand.

Two clients, two parameters, f_i(x) = 1/2 (x - b_i)^T A_i (x - b_i):

    A_1 = diag(1, 2), b_1 = (1, 0), p_1 = 1/4        A_2 = diag(3, 1), b_2 = (0, 2), p_2 = 3/4

At x_1 = 0 the gradients are (-1, 0) and (0, -2), g = (-1/4, -3/2), f(0) = 1/4 * 1/2 + 3/4 * 2 =
1.625. Without damping the mean inverse is diag(1/4 + 1/4, 1/8 + 3/4) = diag(1/2, 7/8), so p = (1/8,
21/16) and g^T p = -2. The mean Hessian is diag(5/2, 5/4): f(p) = 1.625 - 2 + (5/2 * 1/64 + 5/4 *
441/256)/2 = 0.721..., below 1.625 - 0.2: the full step.

With mu = 1: mean inverse diag(5/16, 11/24), p = (0.078125, 0.6875), again the full step.

Line search: one parameter, A = (1, 9), b = (1, 1), p = (1/2, 1/2). From 0: g = -5, mean inverse
5/9, p = 25/9, f(t p) = 5/2 (1 - 25/9 t)^2. At t = 1 it is 7.9 > 5/2; at t = 1/2 it is 5/2 *
(7/18)^2 = 0.378 and f(0) - 0.1 t 5 * 25/9 = 2.5 - 0.694 = 1.806: t = 1/2, x = 25/18. The distance
to 1 is multiplied by -7/18 each round.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from quadratics import OPTIONS, close, go, pair, parts

from fedsso import Federation, InputError, simulate
from fedsso.algorithms.second_order.giant import GIANT
from fedsso.data import quadratic


@pytest.mark.parametrize(("mu", "x"), [(0, [0.125, 1.3125]), (1, [0.078125, 0.6875])])
def test_one_round(mu: float, x: list[float]) -> None:
    result = go(pair(), GIANT(mu=mu, tol=1e-14), 1)
    assert result.x.tolist() == pytest.approx(x, abs=1e-14)
    assert result.trace["train_loss"][1] == pytest.approx(1.625, rel=1e-14)
    assert result.trace["grad_norm"][1] == pytest.approx(math.hypot(0.25, 1.5), rel=1e-14)


def test_bytes() -> None:
    """Down x, g and p; up a gradient, a direction, f_i(x) and ten losses."""
    trace = go(pair(), GIANT(), 1).trace
    assert trace["bytes_down"][1] == 2 * 3 * 2 * 8
    assert trace["bytes_up"][1] == 2 * (2 * 2 + 11) * 8


def test_line_search() -> None:
    fed = quadratic([[[1]], [[9]]], [[1], [1]])
    for k in (1, 2, 3):
        assert go(fed, GIANT(mu=0), k).x.item() == pytest.approx(1 - (-7 / 18) ** k, rel=1e-13)


def test_line_search_near_a_minimum() -> None:
    """b = (3, 0) has the minimiser 3/10 and f > 0 there: soon the losses differ by rounding, yet
    the halves go on."""
    fed = quadratic([[[1]], [[9]]], [[3], [0]])
    for k in (3, 32):
        assert go(fed, GIANT(mu=0), k).x.item() == pytest.approx(
            0.3 * (1 - (-7 / 18) ** k), abs=1e-12
        )


@pytest.mark.parametrize("mu", [0, 0.3])
def test_full_steps_on_quadratics(quad: Federation, mu: float) -> None:
    """x - sum p_i (A_i + mu I)^-1 grad f(x)."""
    A, Ab = parts(quad)
    x = torch.zeros(6, dtype=torch.float64)
    for k in range(1, 4):
        g = torch.einsum("n,ni->i", quad.p, A @ x - Ab)
        x = x - quad.p @ torch.linalg.solve(
            A + mu * torch.eye(6, dtype=torch.float64), g.expand(4, 6)
        )
        close(go(quad, GIANT(mu=mu, tol=1e-14), k).x, x)


def test_equal_hessians_need_one_round(quad: Federation) -> None:
    A = parts(quad)[0][:1].expand(4, 6, 6)
    fed = quadratic(A, torch.linspace(-1, 1, 24).view(4, 6), quad.p)
    assert fed.optimum is not None
    close(go(fed, GIANT(mu=0, tol=1e-14), 1).x, fed.optimum)


def test_limit_is_the_minimiser(quad: Federation) -> None:
    assert quad.optimum is not None
    close(go(quad, GIANT(mu=0.1), 20, eval_every=20).x, quad.optimum)


def test_loss_falls_from_round_to_round(fed: Federation) -> None:
    losses = simulate(fed, "mclr", GIANT(), rounds=8, **OPTIONS).trace["train_loss"][1:]
    assert (losses[1:] < losses[:-1]).all()


@pytest.mark.parametrize("wrong", [{"mu": -1}, {"tol": -1}, {"cg_steps": 0}])
def test_wrong_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(wrong))} must be"):
        GIANT(**wrong)
