"""LocalNewton by hand.

Two clients, two parameters, f_i(x) = 1/2 (x - b_i)^T A_i (x - b_i):

    A_1 = diag(1, 2), b_1 = (1, 0), p_1 = 1/4        A_2 = diag(3, 1), b_2 = (0, 2), p_2 = 3/4

Undamped, a Newton step leads each client to its own b_i: p = b_mean - x, b_mean = (1/4, 3/2). From
0, with g = (-1/4, -3/2) and the mean Hessian diag(5/2, 5/4): g^T p = -2.3125 and f(p) = 1.625 -
2.3125 + (5/2 * 1/16 + 5/4 * 9/4)/2 = 0.796875, below 1.625 - 0.23125: the full step, to b_mean.
There p = 0, and it stays; the minimiser of f is (1/10, 6/5).

With mu = 1, (A_i + I)^-1 A_i b_i = (1/2, 0) and (0, 1): p = (1/8, 3/4), the full step again.

Line search: one parameter, A = (1, 9), b = (3, 0), p = (1/2, 1/2). From 0: b_mean = 3/2, g = -3/2,
mean Hessian 5, f(t p) = 9/4 - 9/4 t + 45/8 t^2, which at t = 1/2, 1/4, 1/8 is 2.53, 2.04, 2.06; 9/4
- 0.1 * 9/4 * 1/4 = 2.19: t = 1/4, x = 3/8. There g = 5 * 3/8 - 3/2 = 3/8 > 0 and p = 9/8 points
uphill: no step lowers f, x stays.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quadratics import OPTIONS, close, go, pair, parts

from fedsso import Federation, InputError, simulate
from fedsso.algorithms.second_order.localnewton import LocalNewton
from fedsso.data import quadratic


def test_goes_to_the_mean_of_the_clients_minimisers_and_stays() -> None:
    for k in (1, 2, 5):
        assert go(pair(), LocalNewton(mu=0, tol=1e-14), k).x.tolist() == pytest.approx(
            [0.25, 1.5], abs=1e-13
        )


def test_damped() -> None:
    result = go(pair(), LocalNewton(mu=1, tol=1e-14), 1)
    assert result.x.tolist() == pytest.approx([0.125, 0.75], abs=1e-14)
    assert result.trace["train_loss"][1] == pytest.approx(1.625, rel=1e-14)


def test_bytes() -> None:
    """Down x and p; up an update, ten losses, f_i(x) and a slope."""
    trace = go(pair(), LocalNewton(), 1).trace
    assert trace["bytes_down"][1] == 2 * 2 * 2 * 8
    assert trace["bytes_up"][1] == 2 * (2 + 12) * 8


def test_line_search() -> None:
    fed = quadratic([[[1]], [[9]]], [[3], [0]])
    assert go(fed, LocalNewton(mu=0), 1).x.item() == pytest.approx(3 / 8, rel=1e-14)
    assert go(fed, LocalNewton(mu=0), 2).x.item() == pytest.approx(3 / 8, rel=1e-14)


@pytest.mark.parametrize("newton_steps", [1, 3])
def test_one_client_needs_one_round(quad: Federation, newton_steps: int) -> None:
    A, Ab = (v[:1] for v in parts(quad))
    b = torch.linalg.solve(A, Ab)
    close(go(quadratic(A, b), LocalNewton(mu=0, tol=1e-14, newton_steps=newton_steps), 1).x, b[0])


def test_quadratics(quad: Federation) -> None:
    """The first step is sum p_i (A_i + mu I)^-1 A_i b_i; more Newton steps solve the same proximal
    problems."""
    A, Ab = parts(quad)
    x = quad.p @ torch.linalg.solve(A + 0.3 * torch.eye(6, dtype=torch.float64), Ab)
    for newton_steps in (1, 2):
        close(go(quad, LocalNewton(mu=0.3, tol=1e-14, newton_steps=newton_steps), 1).x, x)


def test_loss_falls_from_round_to_round(fed: Federation) -> None:
    losses = simulate(fed, "mclr", LocalNewton(mu=1), rounds=6, **OPTIONS).trace["train_loss"][1:]
    assert (losses[1:] < losses[:-1]).all()


@pytest.mark.parametrize("wrong", [{"mu": -1}, {"tol": -1}, {"newton_steps": 0}, {"cg_steps": 0}])
def test_wrong_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(wrong))} must be"):
        LocalNewton(**wrong)


def test_a_start_at_the_minimiser_stays(quad: Federation) -> None:
    """The clients pull elsewhere, but no step along the mean of their updates lowers f."""
    assert quad.optimum is not None
    options = {**OPTIONS, "init": quad.optimum, "eval_train": True}
    trace = simulate(quad, "linear", LocalNewton(), rounds=5, **options).trace
    assert trace["full_train_loss"][-1] == pytest.approx(trace["full_train_loss"][0], rel=1e-12)
