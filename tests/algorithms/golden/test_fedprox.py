"""FedProx by hand.

Two clients, two parameters, f_i(x) = 1/2 (x - b_i)^T A_i (x - b_i):

    A_1 = diag(1, 2), b_1 = (1, 0), p_1 = 1/4        A_2 = diag(3, 1), b_2 = (0, 2), p_2 = 3/4

alpha = 0.1, mu = 1, tau = 2, x_1 = (0, 0). A step takes the update delta to (1 - 0.1 (A + 1)) delta
+ 0.1 A (b - x), so two steps from 0 give 0.1 A (2 - 0.1 (A + 1)) (b - x): the factor of b - x is
0.18 for A = 1, 0.34 for 2, 0.48 for 3.

Round 1   client 1: (0.18, 0)        client 2: (0, 0.36)         mean (0.045, 0.27)
          losses as FedAvg's at the start; after a step 0.9^2/2 = 0.405 and 1.8^2/2 = 1.62,
          mean 1.470625
Round 2   client 1: (0.18 * 0.955, -0.34 * 0.27) = (0.1719, -0.0918)
          client 2: (-0.48 * 0.045, 0.18 * 1.73) = (-0.0216, 0.3114)
          mean (0.042975 - 0.0162, -0.02295 + 0.23355) = (0.026775, 0.2106),
          x_3 = (0.071775, 0.4806)
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsso import FedAvg, Federation, FedSGD, Run, simulate
from fedsso.algorithm import Algorithm
from fedsso.algorithms.first_order.fedprox import FedProx
from fedsso.data import quadratic
from fedsso.errors import InputError

OPTIONS: dict[str, Any] = {
    "batch_size": None,
    "dtype": "float64",
    "device": "cpu",
    "eval_every": 1000,
}


def by_hand(rounds: int) -> Run:
    fed = quadratic([[[1, 0], [0, 2]], [[3, 0], [0, 1]]], [[1, 0], [0, 2]], [0.25, 0.75])
    result: Run = simulate(
        fed, "linear", FedProx(alpha=0.1, mu=1), rounds=rounds, local_steps=2, **OPTIONS
    )
    return result


def run(fed: Federation, algorithm: Algorithm, rounds: int, tau: int) -> Tensor:
    x: Tensor = simulate(fed, "linear", algorithm, rounds=rounds, local_steps=tau, **OPTIONS).x
    return x


def parts(fed: Federation) -> tuple[Tensor, Tensor, Tensor]:
    """A [N, d, d], b [N, d, 1] and p [N, 1, 1] of a federation of quadratics."""
    rows = [fed.rows_of(i) for i in range(fed.clients)]
    a, t = torch.stack([fed.x[r] for r in rows]), torch.stack([fed.y[r] for r in rows])
    return 2 / a.shape[-1] * a.mT @ a, torch.linalg.solve(a, t[..., None]), fed.p[:, None, None]


def test_two_rounds() -> None:
    assert by_hand(1).x.tolist() == pytest.approx([0.045, 0.27], abs=1e-14)
    assert by_hand(2).x.tolist() == pytest.approx([0.071775, 0.4806], abs=1e-14)


def test_trace() -> None:
    trace = by_hand(1).trace
    assert trace["train_loss"][1] == pytest.approx(1.470625, rel=1e-14)
    assert trace["grad_norm"][1] == pytest.approx(math.hypot(0.225, 1.35), rel=1e-14)
    assert trace["bytes_up"][1] == trace["bytes_down"][1] == 2 * 2 * 8


def test_mu_0_is_fedavg(quad: Federation) -> None:
    expected = run(quad, FedAvg(alpha=0.3), 6, 4)
    torch.testing.assert_close(
        run(quad, FedProx(alpha=0.3, mu=0), 6, 4), expected, rtol=0, atol=1e-10
    )


def test_one_step_is_fedsgd_for_any_mu(quad: Federation) -> None:
    """The proximal term has no slope at x itself."""
    expected = run(quad, FedSGD(alpha=0.3), 6, 1)
    torch.testing.assert_close(
        run(quad, FedProx(alpha=0.3, mu=2), 6, 1), expected, rtol=0, atol=1e-10
    )


def test_many_steps_solve_the_local_problem(quad: Federation) -> None:
    """y_i = (A_i + mu I)^-1 (A_i b_i + mu x), here from x = 0 and again from the mean of these."""
    A, b, p = parts(quad)
    x, mu = torch.zeros(6, 1, dtype=torch.float64), 0.5
    for rounds in (1, 2):
        x = (p * torch.linalg.solve(A + mu * torch.eye(6), A @ b + mu * x)).sum(0)
        y = run(quad, FedProx(alpha=1.0, mu=mu), rounds, 60)
        torch.testing.assert_close(y, x[:, 0], rtol=0, atol=1e-10)


def test_an_infinite_mu_holds_the_clients(quad: Federation) -> None:
    """With alpha = 1/mu the update is that of a single step of this size, up to O(1/mu^2)."""
    mu = 1e6
    y = run(quad, FedProx(alpha=1 / mu, mu=mu), 1, 50)
    assert float(y.norm()) < 1e-5
    torch.testing.assert_close(mu * y, run(quad, FedSGD(alpha=1.0), 1, 1), rtol=0, atol=1e-5)


def test_limit_is_the_fixed_point(quad: Federation) -> None:
    """x = sum p_i y_i(x), where y_i - x = S_i (b_i - x), S_i = alpha sum_{j < tau} (I - alpha (A_i
    + mu))^j A_i.

    It lies nearer the minimiser than FedAvg's.
    """
    A, b, p = parts(quad)
    alpha, mu, tau, eye = 0.5, 1.0, 4, torch.eye(6, dtype=torch.float64)
    powers = [torch.linalg.matrix_power(eye - alpha * (A + mu * eye), j) for j in range(tau)]
    S = alpha * torch.stack(powers).sum(0) @ A
    fixed = torch.linalg.solve((p * S).sum(0), (p * S @ b).sum(0))[:, 0]
    x = run(quad, FedProx(alpha=alpha, mu=mu), 120, tau)
    torch.testing.assert_close(x, fixed, rtol=0, atol=1e-10)
    assert quad.optimum is not None
    plain = run(quad, FedAvg(alpha=alpha), 40, tau)
    assert (x - quad.optimum).norm() < 0.9 * (plain - quad.optimum).norm()


@pytest.mark.parametrize("values", [{"mu": -0.1}, {"alpha": 0}])
def test_wrong_values_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(InputError, match="must be >"):
        FedProx(**values)
