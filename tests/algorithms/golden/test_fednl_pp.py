"""FedNL with partial participation by hand.

Two clients, two parameters, f_i(x) = 1/2 (x - b_i)^T A_i (x - b_i):

    A_1 = diag(1, 2), b_1 = (1, 0), p_1 = 1/4        A_2 = diag(3, 1), b_2 = (0, 2), p_2 = 3/4

Both answer, rank:1, x_1 = (0, 0):

Round 1   H_1 = diag(0, 2), H_2 = diag(3, 0), l_1 = l_2 = 1, g_i = -gradient_i(0) = A_i b_i
          x = (diag(2.25, 0.5) + I)^-1 (0.25, 1.5) = (1/13, 1)
Round 2   H_i = A_i, l_i = 0, g_i = A_i x - A_i (x - b_i) = A_i b_i: x = (0.1, 1.2) minimises f.

Without compression the model of a client is its f_i after its first answer, so x always minimises
the sum of the f_i of those seen so far, however few answer in a round.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedsso import Federation, InputError, Run, load, simulate
from fedsso.algorithms.second_order.fednl import FedNLPP
from fedsso.data import quadratic
from fedsso.engine.rounds import Rounds
from fedsso.engine.settings import Settings

OPTIONS: dict[str, Any] = {"batch_size": None, "dtype": "float64", "device": "cpu"}
HALF: dict[str, Any] = {"participation": 0.5, "seed": 3}


def hand(rounds: int, **fields: Any) -> Run:
    fed = quadratic([[[1, 0], [0, 2]], [[3, 0], [0, 1]]], [[1, 0], [0, 2]], [0.25, 0.75])
    result: Run = simulate(fed, "linear", FedNLPP(**fields), rounds=rounds, **OPTIONS)
    return result


def quadratics(fed: Federation) -> tuple[Tensor, Tensor]:
    """A_i [N, d, d] and A_i b_i [N, d] of a federation of quadratics."""
    rows = [fed.rows_of(i) for i in range(fed.clients)]
    a = torch.stack([fed.x[r] for r in rows]) * (2 / fed.x.shape[1]) ** 0.5
    t = torch.stack([fed.y[r] for r in rows]) * (2 / fed.x.shape[1]) ** 0.5
    return a.mT @ a, (a.mT @ t[..., None])[..., 0]


def textbook(fed: Federation, rounds: int, R: int, a: float, **protocol: Any) -> Tensor:
    """The paper's algorithm with a truncated singular value decomposition, over the clients seen so
    far."""
    A, Ab = quadratics(fed)
    draws, d = Rounds(fed, Settings(**protocol)), A.shape[-1]
    x, H, l, g = A.new_zeros(d), torch.zeros_like(A), A.new_zeros(len(A)), torch.zeros_like(Ab)
    for k in range(1, rounds + 1):
        for i in draws.plan(k).answered.tolist():
            U, s, V = torch.linalg.svd(A[i] - H[i])
            H[i] += a * U[:, :R] @ torch.diag(s[:R]) @ V[:R]
            l[i] = (A[i] - H[i]).norm()
            g[i] = (H[i] + l[i] * torch.eye(d).double()) @ x - (A[i] @ x - Ab[i])
        mean = torch.einsum("n,nij->ij", fed.p, H) + (fed.p @ l) * torch.eye(d).double()
        x = torch.linalg.solve(mean, fed.p @ g)
    return x


def test_two_rounds() -> None:
    assert hand(1).x.tolist() == pytest.approx([1 / 13, 1], abs=1e-14)
    assert hand(2).x.tolist() == pytest.approx([0.1, 1.2], abs=1e-14)
    assert hand(1, compressor="none").x.tolist() == pytest.approx([0.1, 1.2], abs=1e-14)


def test_trace() -> None:
    """The models' slope at x_1 is the gradient there; x down; g (2), value and vector (3) and l (1)
    up."""
    trace = hand(1).trace
    assert trace["train_loss"][1] == pytest.approx(1 / 8 + 3 / 2, rel=1e-14)
    assert trace["grad_norm"][1] == pytest.approx((0.25**2 + 1.5**2) ** 0.5, rel=1e-14)
    assert trace["bytes_down"][1] == 2 * 2 * 8
    assert trace["bytes_up"][1] == 2 * (2 + 3 + 1) * 8


@pytest.mark.parametrize("compressor", ["none", "rank:6", "topk:21"])
def test_without_loss_the_first_step_is_newtons(quad: Federation, compressor: str) -> None:
    """One Hessian ahead of plain FedNL, which gets there in its second step."""
    result = simulate(quad, "linear", FedNLPP(compressor=compressor), rounds=1, **OPTIONS)
    torch.testing.assert_close(result.x, quad.optimum, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("R", "a"), [(1, 1.0), (2, 1.0), (1, 0.5)])
@pytest.mark.parametrize("protocol", [{}, HALF], ids=["all", "half"])
def test_the_papers_algorithm(quad: Federation, protocol: dict[str, Any], R: int, a: float) -> None:
    """With everybody it is option 2 of FedNL with H_i and l_i updated before the step."""
    for rounds in (1, 3, 6):
        record = FedNLPP(compressor=f"rank:{R}", a=a)
        x = simulate(quad, "linear", record, rounds=rounds, **protocol, **OPTIONS).x
        torch.testing.assert_close(x, textbook(quad, rounds, R, a, **protocol), rtol=0, atol=1e-10)


def test_the_minimiser_of_those_seen(quad: Federation) -> None:
    A, Ab = quadratics(quad)
    draws, seen = Rounds(quad, Settings(**HALF)), set[int]()
    sizes = []
    for k in range(1, 6):
        seen |= set(draws.plan(k).answered.tolist())
        sizes.append(len(seen))
        p = torch.zeros(4).double()
        p[list(seen)] = quad.p[list(seen)]
        best = torch.linalg.solve(torch.einsum("n,nij->ij", p, A), p @ Ab)
        x = simulate(quad, "linear", FedNLPP(compressor="none"), rounds=k, **HALF, **OPTIONS).x
        torch.testing.assert_close(x, best, rtol=0, atol=1e-10)
    assert sizes[0] == 2
    assert sizes[-1] == 4


@pytest.mark.parametrize("compressor", ["rank:1", "topk:5", "powersgd:2", "randk:14"])
def test_the_limit_is_the_minimiser(quad: Federation, compressor: str) -> None:
    result = simulate(
        quad, "linear", FedNLPP(compressor=compressor), rounds=50, **HALF, drop_rate=0.2, **OPTIONS
    )
    torch.testing.assert_close(result.x, quad.optimum, rtol=0, atol=1e-10)


def test_the_limit_of_a_curved_problem_is_the_minimiser() -> None:
    fed = load("synthetic", kind="logistic", clients=4, dim=5)
    record = FedNLPP(compressor="rank:2")
    result = simulate(fed, "linear", record, loss="bce", rounds=40, **HALF, **OPTIONS)
    torch.testing.assert_close(result.x, fed.optimum, rtol=0, atol=1e-10)


def test_wrong_fields() -> None:
    with pytest.raises(InputError, match="unknown compressor 'rank:'"):
        FedNLPP(compressor="rank:")
    with pytest.raises(InputError, match="a must be > 0"):
        FedNLPP(a=0)
    with pytest.raises(InputError, match="use fedsso"):
        FedNLPP().server_init(torch.empty(1, 20_001, device="meta"))
