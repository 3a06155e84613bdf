"""FedNew by hand.

Two clients, two parameters, f_i(x) = 1/2 (x - b_i)^T A_i (x - b_i):

    A_1 = diag(1, 2), b_1 = (1, 0), p_1 = 1/4        A_2 = diag(3, 1), b_2 = (0, 2), p_2 = 3/4

mu = rho = 1/2, x_1 = (0, 0), so the clients solve with diag(2, 3) and diag(4, 2).

Round 1   gradients (-1, 0) and (0, -2): y_1 = (-1/2, 0), y_2 = (0, -1), y = (-1/8, -3/4),
          x = (1/8, 3/4)
          lam_1 = (y_1 - y)/2 = (-3/16, 3/8), lam_2 = (1/16, -1/8)
Round 2   gradients (-7/8, 3/2) and (3/8, -5/4); minus lam_i, plus y/2: (-3/4, 3/4) and (1/4, -3/2)
          y_1 = (-3/8, 1/4), y_2 = (1/16, -3/4), y = (-3/64, -1/2), x = (11/64, 5/4)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedsso import Federation, InputError, Run, load, simulate
from fedsso.algorithms.second_order.fednew import FedNew
from fedsso.data import quadratic

OPTIONS: dict[str, Any] = {"batch_size": None, "dtype": "float64", "device": "cpu"}


def hand(rounds: int) -> Run:
    fed = quadratic([[[1, 0], [0, 2]], [[3, 0], [0, 1]]], [[1, 0], [0, 2]], [0.25, 0.75])
    record = FedNew(mu=0.5, rho=0.5, tol=1e-14)
    result: Run = simulate(fed, "linear", record, rounds=rounds, **OPTIONS)
    return result


def run(fed: Federation, rounds: int, **fields: Any) -> Tensor:
    result: Run = simulate(fed, "linear", FedNew(tol=1e-14, **fields), rounds=rounds, **OPTIONS)
    return result.x


def curved(rounds: int, r: int) -> Tensor:
    fed = load("synthetic", kind="logistic", clients=4, dim=5)
    record = FedNew(mu=0.1, rho=0.4, tol=1e-14, r=r)
    result: Run = simulate(fed, "linear", record, loss="bce", rounds=rounds, **OPTIONS)
    return result.x


def quadratics(fed: Federation) -> tuple[Tensor, Tensor]:
    """A_i [N, d, d] and A_i b_i [N, d] of a federation of quadratics."""
    rows = [fed.rows_of(i) for i in range(fed.clients)]
    a = torch.stack([fed.x[r] for r in rows]) * (2 / fed.x.shape[1]) ** 0.5
    t = torch.stack([fed.y[r] for r in rows]) * (2 / fed.x.shape[1]) ** 0.5
    return a.mT @ a, (a.mT @ t[..., None])[..., 0]


def textbook(fed: Federation, rounds: int, mu: float, rho: float) -> Tensor:
    """The paper's algorithm, with y and lam_i updated where it does."""
    A, Ab = quadratics(fed)
    x, y, lam = A.new_zeros(6), A.new_zeros(6), torch.zeros_like(Ab)
    for _ in range(rounds):
        damped = A + (mu + rho) * torch.eye(6).double()
        y_i = torch.linalg.solve(damped, A @ x - Ab - lam + rho * y)
        y = fed.p @ y_i
        lam = lam + rho * (y_i - y)
        x = x - y
    return x


def test_two_rounds() -> None:
    assert hand(1).x.tolist() == pytest.approx([1 / 8, 3 / 4], abs=1e-14)
    assert hand(2).x.tolist() == pytest.approx([11 / 64, 5 / 4], abs=1e-14)


def test_trace() -> None:
    """x down, y_i up."""
    trace = hand(1).trace
    assert trace["train_loss"][1] == pytest.approx(1 / 8 + 3 / 2, rel=1e-14)
    assert trace["bytes_down"][1] == trace["bytes_up"][1] == 2 * 2 * 8


@pytest.mark.parametrize(("mu", "rho"), [(0.1, 0.1), (0.01, 0.5), (0.3, 0.0)])
def test_the_papers_algorithm(quad: Federation, mu: float, rho: float) -> None:
    for rounds in (1, 2, 9):
        torch.testing.assert_close(
            run(quad, rounds, mu=mu, rho=rho), textbook(quad, rounds, mu, rho), rtol=0, atol=1e-10
        )


@pytest.mark.parametrize(("mu", "rho", "rounds"), [(0.01, 0.3, 100), (0.3, 0.5, 80)])
def test_the_limit_is_the_minimiser(quad: Federation, mu: float, rho: float, rounds: int) -> None:
    """The distance shrinks by 0.77 and 0.72 in each round."""
    torch.testing.assert_close(run(quad, rounds, mu=mu, rho=rho), quad.optimum, rtol=0, atol=1e-10)


def test_without_consensus_it_is_another_point(quad: Federation) -> None:
    """rho = 0 leaves lam_i = 0: x settles where sum p_i (A_i + mu I)^-1 gradient_i = 0."""
    x = run(quad, 120, mu=0.1, rho=0.0)
    A, Ab = quadratics(quad)
    mean = torch.einsum(
        "n,ni->i", quad.p, torch.linalg.solve(A + 0.1 * torch.eye(6).double(), A @ x - Ab)
    )
    assert mean.norm() < 1e-10
    assert (x - quad.optimum).norm() > 0.1


@pytest.mark.parametrize("r", [0, 2, 3])
def test_quadratics_have_one_hessian(quad: Federation, r: int) -> None:
    torch.testing.assert_close(run(quad, 5, r=r), run(quad, 5), rtol=0, atol=1e-10)


def test_hessians_are_taken_every_r_rounds() -> None:
    """r = 2 is r = 0 for two rounds and takes a new Hessian in the third, r = 1 in the second."""
    torch.testing.assert_close(curved(1, 0), curved(1, 1), rtol=0, atol=1e-14)
    torch.testing.assert_close(curved(2, 0), curved(2, 2), rtol=0, atol=1e-14)
    assert (curved(2, 0) - curved(2, 1)).norm() > 1e-3
    assert (curved(3, 0) - curved(3, 2)).norm() > 1e-3


@pytest.mark.parametrize("r", [0, 1, 4])
def test_the_limit_of_a_curved_problem_is_the_minimiser(r: int) -> None:
    optimum = load("synthetic", kind="logistic", clients=4, dim=5).optimum
    torch.testing.assert_close(curved(60, r), optimum, rtol=0, atol=2e-5)


def test_it_needs_every_client(quad: Federation) -> None:
    with pytest.raises(InputError, match="scaffold"):
        simulate(quad, "linear", FedNew(), rounds=1, drop_rate=0.1, **OPTIONS)


@pytest.mark.parametrize(
    "fields", [{"mu": -1}, {"rho": -0.1}, {"r": -1}, {"r": 1.5}, {"cg_steps": 0}, {"tol": -1}]
)
def test_wrong_fields(fields: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(fields))} must be"):
        FedNew(**fields)
