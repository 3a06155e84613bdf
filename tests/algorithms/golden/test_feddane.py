"""FedDANE by hand.

Two clients, two parameters, f_i(x) = 1/2 (x - b_i)^T A_i (x - b_i):

    A_1 = diag(1, 2), b_1 = (1, 0), p_1 = 1/4        A_2 = diag(3, 1), b_2 = (0, 2), p_2 = 3/4

At x_1 = 0 the gradients are (-1, 0) and (0, -2), g = (-1/4, -3/2). A client minimises
f_i(y) + <g - grad f_i(x), y> + mu/2 |y|^2, whose gradient is (A_i + mu I) y + g. With mu = 1:

exact   (A_i + I)^-1 = diag(1/2, 1/3), diag(1/4, 1/2), mean diag(5/16, 11/24)
        x = (5/16 * 1/4, 11/24 * 3/2) = (0.078125, 0.6875)
sgd     alpha = 0.1, tau = 2: y = -0.1 (2 - 0.1 (A_i + I)) g,
        factors (0.18, 0.17) and (0.16, 0.18),
        mean (0.045 + 0.12, 0.0425 + 0.135) = (0.165, 0.1775), x = (0.04125, 0.26625)
        losses at y = 0 and y = -0.1 g = (0.025, 0.15):
        client 1: 1/2 and (0.975^2 + 2 * 0.15^2)/2 = 0.4978125
        client 2: 2 and (3 * 0.025^2 + 1.85^2)/2 = 1.7121875
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from quadratics import close, go, pair, parts

from fedsso import Federation, FedSGD, InputError
from fedsso.algorithms.second_order.feddane import FedDANE
from fedsso.data import quadratic

EXACT: dict[str, Any] = {"solver": "exact", "newton_steps": 1, "tol": 1e-14}


def test_by_sgd() -> None:
    result = go(pair(), FedDANE(alpha=0.1, mu=1), 1)
    assert result.x.tolist() == pytest.approx([0.04125, 0.26625], abs=1e-14)
    loss = 0.25 * (0.5 + 0.4978125) / 2 + 0.75 * (2 + 1.7121875) / 2
    assert result.trace["train_loss"][1] == pytest.approx(loss, rel=1e-14)


def test_exactly() -> None:
    result = go(pair(), FedDANE(mu=1, **EXACT), 1)
    assert result.x.tolist() == pytest.approx([0.078125, 0.6875], abs=1e-13)
    assert result.trace["train_loss"][1] == pytest.approx(0.25 * 0.5 + 0.75 * 2, rel=1e-14)


@pytest.mark.parametrize("solver", ["sgd", "exact"])
def test_trace(solver: str) -> None:
    trace = go(pair(), FedDANE(mu=1, solver=solver), 1).trace
    assert trace["grad_norm"][1] == pytest.approx(math.hypot(0.25, 1.5), rel=1e-14)
    assert (
        trace["bytes_up"][1] == trace["bytes_down"][1] == 2 * 2 * 2 * 8
    )  # x is not sent again with g


def test_exact_solutions_on_quadratics(quad: Federation) -> None:
    """x - sum p_i (A_i + mu I)^-1 grad f(x)."""
    A, Ab = parts(quad)
    x, mu = torch.zeros(6, dtype=torch.float64), 0.3
    for k in range(1, 4):
        g = torch.einsum("n,ni->i", quad.p, A @ x - Ab)
        steps = torch.linalg.solve(A + mu * torch.eye(6, dtype=torch.float64), g.expand(4, 6))
        x = x - quad.p @ steps
        close(go(quad, FedDANE(mu=mu, **EXACT), k).x, x)


def test_equal_hessians_need_one_round(quad: Federation) -> None:
    A = parts(quad)[0][:1].expand(4, 6, 6)
    fed = quadratic(A, torch.linspace(-1, 1, 24).view(4, 6), quad.p)
    assert fed.optimum is not None
    close(go(fed, FedDANE(mu=0, **EXACT), 1).x, fed.optimum)


def test_one_step_is_distributed_gradient_descent(quad: Federation) -> None:
    a = go(quad, FedDANE(alpha=0.3, mu=0.5), 5, local_steps=1)
    close(a.x, go(quad, FedSGD(alpha=0.3), 5).x)


@pytest.mark.parametrize("extra", [{"alpha": 0.5}, EXACT], ids=["sgd", "exact"])
def test_limit_is_the_minimiser(quad: Federation, extra: dict[str, Any]) -> None:
    assert quad.optimum is not None
    close(go(quad, FedDANE(mu=0.1, **extra), 20, local_steps=15, eval_every=20).x, quad.optimum)


def test_second_exchange_draws_its_own_clients(quad: Federation) -> None:
    """Two of four clients in each: who did not take part in the first receives x as well as g."""
    trace = go(quad, FedDANE(), 20, participation=0.5).trace
    vectors = trace["bytes_down"][1:] / (6 * 8)
    assert set(vectors.tolist()) == {4, 5, 6}
    assert set(trace["bytes_up"][1:].tolist()) == {4 * 6 * 8}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mu": -1}, "mu must be >= 0"),
        ({"tol": -1e-3}, "tol must be >= 0"),
        ({"solver": "exakt"}, "unknown solver 'exakt'; did you mean 'exact'"),
        ({"alpha": 0}, "alpha must be > 0"),
        ({"newton_steps": 0}, "newton_steps must be an integer >= 1"),
        ({"cg_steps": 0}, "cg_steps must be an integer >= 1"),
    ],
)
def test_wrong_values(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FedDANE(**wrong)
