"""FedPM by hand.

Two clients, two parameters, f_i(x) = 1/2 (x - b_i)^T A_i (x - b_i):

    A_1 = diag(1, 2), b_1 = (1, 0), p_1 = 1/4        A_2 = diag(3, 1), b_2 = (0, 2), p_2 = 3/4

mu = 1/2, x_1 = (0, 0): theta_1 = diag(1.5, 2.5)^-1 (1, 0) = (2/3, 0) and theta_2 = diag(3.5,
1.5)^-1 (0, 2) = (0, 4/3). The server mixes with sum p_i P_i = diag(3, 1.75): x = ((1/4) 1.5 (2/3) /
3, (3/4) 1.5 (4/3) / 1.75) = (1/12, 6/7). With eta = 1/2 the clients go half as far, and so does the
server: (1/24, 3/7). With mu = 0, x = (0.1, 1.2) minimises f.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedsso import Federation, InputError, Run, load, simulate
from fedsso.algorithms.second_order.fednl import FedNLPP
from fedsso.algorithms.second_order.fedpm import FedPM
from fedsso.data import quadratic
from fedsso.engine.rounds import Rounds
from fedsso.engine.settings import Settings

OPTIONS: dict[str, Any] = {"batch_size": None, "dtype": "float64", "device": "cpu"}


def hand(rounds: int, **fields: Any) -> Run:
    fed = quadratic([[[1, 0], [0, 2]], [[3, 0], [0, 1]]], [[1, 0], [0, 2]], [0.25, 0.75])
    result: Run = simulate(fed, "linear", FedPM(**fields), rounds=rounds, **OPTIONS)
    return result


def quadratics(fed: Federation) -> tuple[Tensor, Tensor]:
    """A_i [N, d, d] and A_i b_i [N, d] of a federation of quadratics."""
    rows = [fed.rows_of(i) for i in range(fed.clients)]
    a = torch.stack([fed.x[r] for r in rows]) * (2 / fed.x.shape[1]) ** 0.5
    t = torch.stack([fed.y[r] for r in rows]) * (2 / fed.x.shape[1]) ** 0.5
    return a.mT @ a, (a.mT @ t[..., None])[..., 0]


def test_one_round() -> None:
    assert hand(1, mu=0.5).x.tolist() == pytest.approx([1 / 12, 6 / 7], abs=1e-14)
    assert hand(1, mu=0.5, eta=0.5).x.tolist() == pytest.approx([1 / 24, 3 / 7], abs=1e-14)
    assert hand(1, mu=0).x.tolist() == pytest.approx([0.1, 1.2], abs=1e-14)


@pytest.mark.parametrize("eta", [1.0, 0.25])
def test_trace(eta: float) -> None:
    """The length of the gradient whatever the step; x down; P_i theta_i (2) and the triangle of P_i
    (3) up."""
    trace = hand(1, eta=eta).trace
    assert trace["train_loss"][1] == pytest.approx(1 / 8 + 3 / 2, rel=1e-14)
    assert trace["grad_norm"][1] == pytest.approx((0.25**2 + 1.5**2) ** 0.5, rel=1e-14)
    assert trace["bytes_down"][1] == 2 * 2 * 8
    assert trace["bytes_up"][1] == 2 * (2 + 3) * 8


def test_undamped_it_is_newtons_method(quad: Federation) -> None:
    result = simulate(quad, "linear", FedPM(mu=0), rounds=1, **OPTIONS)
    torch.testing.assert_close(result.x, quad.optimum, rtol=0, atol=1e-10)


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_on_a_curved_problem_too(rounds: int) -> None:
    """FedNL-PP with everybody and without compression is Newton's method, found in another way."""
    fed = load("synthetic", kind="logistic", clients=4, dim=5)
    mixed, other = (
        simulate(fed, "linear", record, loss="bce", rounds=rounds, **OPTIONS).x
        for record in (FedPM(mu=0), FedNLPP(compressor="none"))
    )
    torch.testing.assert_close(mixed, other, rtol=0, atol=1e-10)
    if rounds == 4:
        torch.testing.assert_close(mixed, fed.optimum, rtol=0, atol=1e-4)


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_local_steps_and_their_mixture(quad: Federation, participation: float) -> None:
    """theta_i = theta - eta P_i^-1 g_i and (sum p_i P_i)^-1 sum p_i P_i theta_i, written out."""
    A, Ab = quadratics(quad)
    P = A + 0.2 * torch.eye(6).double()
    draws, x = Rounds(quad, Settings(participation=participation, seed=3)), torch.zeros(6).double()
    for k in (1, 2, 3):
        who = draws.plan(k).answered
        theta = x - 0.7 * torch.linalg.solve(P, A @ x - Ab)
        pP = quad.p[who, None, None] * P[who]
        x = torch.linalg.solve(pP.sum(0), torch.einsum("nij,nj->i", pP, theta[who]))
    record = FedPM(mu=0.2, eta=0.7)
    result = simulate(
        quad, "linear", record, rounds=3, participation=participation, seed=3, **OPTIONS
    )
    torch.testing.assert_close(result.x, x, rtol=0, atol=1e-10)


def test_the_limit_is_the_minimiser(quad: Federation) -> None:
    result = simulate(quad, "linear", FedPM(mu=0.1), rounds=30, **OPTIONS)
    torch.testing.assert_close(result.x, quad.optimum, rtol=0, atol=1e-10)


def test_refusals() -> None:
    with pytest.raises(InputError, match="eta must be > 0"):
        FedPM(eta=0)
    with pytest.raises(InputError, match="mu must be >= 0"):
        FedPM(mu=-1)
    with pytest.raises(InputError, match="use fedsso"):
        FedPM().server_init(torch.empty(1, 20_001, device="meta"))
