"""DONE by hand.

Two clients, two parameters, f_i(x) = 1/2 (x - b_i)^T A_i (x - b_i):

    A_1 = diag(1, 2), b_1 = (1, 0), p_1 = 1/4        A_2 = diag(3, 1), b_2 = (0, 2), p_2 = 3/4

At x_1 = 0 the gradients are (-1, 0) and (0, -2), g = (-1/4, -3/2). With alpha = 0.1 and R = 2,
d = -0.1 (2 - 0.1 A_i) g: factors (0.19, 0.18) and (0.17, 0.19), mean
(0.0475 + 0.1275, 0.045 + 0.1425) = (0.175, 0.1875),

    x = (0.175/4, 0.1875 * 3/2) = (0.04375, 0.28125)

and half of it with eta = 1/2.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from quadratics import close, go, parts

from fedsso import Federation, FedSGD, InputError
from fedsso.algorithms.second_order.done import DONE
from fedsso.data import quadratic


@pytest.mark.parametrize("eta", [1.0, 0.5])
def test_one_round(eta: float) -> None:
    fed = quadratic([[[1, 0], [0, 2]], [[3, 0], [0, 1]]], [[1, 0], [0, 2]], [0.25, 0.75])
    result = go(fed, DONE(alpha=0.1, R=2, eta=eta), 1)
    assert result.x.tolist() == pytest.approx([0.04375 * eta, 0.28125 * eta], abs=1e-14)
    assert result.trace["train_loss"][1] == pytest.approx(1.625, rel=1e-14)
    assert result.trace["grad_norm"][1] == pytest.approx(math.hypot(0.25, 1.5), rel=1e-14)
    assert result.trace["bytes_up"][1] == result.trace["bytes_down"][1] == 2 * 2 * 2 * 8


def test_quadratics(quad: Federation) -> None:
    """d = -alpha sum_{j < R} (I - alpha A_i)^j grad f(x)."""
    A, Ab = parts(quad)
    x, alpha, R = torch.zeros(6, dtype=torch.float64), 0.7, 5
    series = sum(
        torch.linalg.matrix_power(torch.eye(6, dtype=torch.float64) - alpha * A, j)
        for j in range(R)
    )
    for k in range(1, 4):
        g = torch.einsum("n,ni->i", quad.p, A @ x - Ab)
        x = x - alpha * quad.p @ (series @ g)
        close(go(quad, DONE(alpha=alpha, R=R), k).x, x)


def test_many_steps_are_newton_directions(quad: Federation) -> None:
    A, Ab = parts(quad)
    step = quad.p @ torch.linalg.solve(A, (quad.p @ Ab).expand(4, 6))
    close(go(quad, DONE(alpha=1, R=250), 1).x, step)


def test_one_step_is_gradient_descent(quad: Federation) -> None:
    close(go(quad, DONE(alpha=0.5, eta=0.6, R=1), 5).x, go(quad, FedSGD(alpha=0.3), 5).x)


def test_limit_is_the_minimiser(quad: Federation) -> None:
    assert quad.optimum is not None
    close(go(quad, DONE(alpha=0.5, R=10), 18, eval_every=18).x, quad.optimum)


@pytest.mark.parametrize("wrong", [{"alpha": 0}, {"eta": -1}, {"R": 0}])
def test_wrong_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(wrong))} must be"):
        DONE(**wrong)
