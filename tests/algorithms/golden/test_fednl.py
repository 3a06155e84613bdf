"""FedNL by hand.

Two clients, two parameters, f_i(x) = 1/2 (x - b_i)^T A_i (x - b_i):

    A_1 = diag(1, 2), b_1 = (1, 0), p_1 = 1/4        A_2 = diag(3, 1), b_2 = (0, 2), p_2 = 3/4

so f has the Hessian diag(2.5, 1.25), the gradient diag(2.5, 1.25) x - (0.25, 1.5) and the minimiser
(0.1, 1.2). x_1 = (0, 0), H_i = 0, all compressors below have a = 1.

Option 2   round 1: H = 0, l = (sqrt 5 + 3 sqrt 10)/4 =: l, so x = (0.25, 1.5)/l
           rank:1 sends S_1 = diag(0, 2) and S_2 = diag(3, 0), hence H = diag(2.25, 0.5)
           round 2: both clients miss an eigenvalue 1, l = 1, so x -= gradient / (3.25, 1.5)
           round 3: H is exact and l = 0: the minimiser. Without compression that happens in
           round 2, and with first="hessian" in round 1.
Option 1   with mu = 1, round 1: [0]_1 = I, x = (0.25, 1.5), where the gradient is (0.375, 0.375)
           round 2: [diag(2.25, 0.5)]_1 = diag(2.25, 1),
           x = (0.25 - 1/6, 1.5 - 0.375) = (1/12, 1.125)
A server step eta = 1/2 halves the first update of either.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsso import Federation, InputError, Run, compare, load, simulate
from fedsso.algorithms.hessians import worth
from fedsso.algorithms.second_order.fednl import FedNL
from fedsso.data import quadratic

OPTIONS: dict[str, Any] = {"batch_size": None, "dtype": "float64", "device": "cpu"}
COLD: dict[str, Any] = {"option": 2, "first": "zero"}  # what most numbers below begin with
L1 = (math.sqrt(5) + 3 * math.sqrt(10)) / 4


def hand(rounds: int, **fields: Any) -> Run:
    fed = quadratic([[[1, 0], [0, 2]], [[3, 0], [0, 1]]], [[1, 0], [0, 2]], [0.25, 0.75])
    result: Run = simulate(fed, "linear", FedNL(**{**COLD, **fields}), rounds=rounds, **OPTIONS)
    return result


def run(fed: Federation, rounds: int, **fields: Any) -> Tensor:
    result: Run = simulate(fed, "linear", FedNL(**{**COLD, **fields}), rounds=rounds, **OPTIONS)
    return result.x


def quadratics(fed: Federation) -> tuple[Tensor, Tensor]:
    """A_i [N, d, d] and A_i b_i [N, d] of a federation of quadratics."""
    rows = [fed.rows_of(i) for i in range(fed.clients)]
    a = torch.stack([fed.x[r] for r in rows]) * (2 / fed.x.shape[1]) ** 0.5
    t = torch.stack([fed.y[r] for r in rows]) * (2 / fed.x.shape[1]) ** 0.5
    return a.mT @ a, (a.mT @ t[..., None])[..., 0]


def textbook(fed: Federation, rounds: int, option: int, R: int, a: float, mu: float) -> Tensor:
    """The paper's Algorithm 1 with a truncated singular value decomposition, client by client."""
    A, Ab = quadratics(fed)
    p, d = fed.p, A.shape[-1]
    x, H_i, H = A.new_zeros(d), torch.zeros_like(A), A.new_zeros(d, d)
    for _ in range(rounds):
        g = torch.einsum("n,ni->i", p, A @ x - Ab)
        l = float(sum(w * float((one - h).norm()) for w, one, h in zip(p, A, H_i, strict=True)))
        values, vectors = torch.linalg.eigh(H)
        safe = vectors @ torch.diag(values.clamp(min=mu)) @ vectors.T
        x = x - torch.linalg.solve(safe if option == 1 else H + l * torch.eye(d).double(), g)
        for i in range(len(p)):
            U, s, V = torch.linalg.svd(A[i] - H_i[i])
            S = U[:, :R] @ torch.diag(s[:R]) @ V[:R]
            H_i[i] += a * S
            H = H + a * p[i] * S
    return x


@pytest.mark.parametrize("compressor", ["rank:1", "topk:1"])
def test_option_2_by_hand(compressor: str) -> None:
    first = np.array([0.25, 1.5]) / L1
    second = first - (np.array([2.5, 1.25]) * first - np.array([0.25, 1.5])) / np.array([3.25, 1.5])
    assert hand(1, compressor=compressor).x.tolist() == pytest.approx(first, abs=1e-14)
    assert hand(2, compressor=compressor).x.tolist() == pytest.approx(second, abs=1e-14)
    assert hand(3, compressor=compressor).x.tolist() == pytest.approx([0.1, 1.2], abs=1e-14)


def test_option_1_by_hand() -> None:
    assert hand(1, option=1, mu=1).x.tolist() == pytest.approx([0.25, 1.5], abs=1e-14)
    assert hand(2, option=1, mu=1).x.tolist() == pytest.approx([1 / 12, 1.125], abs=1e-14)
    assert hand(3, option=1, mu=1).x.tolist() == pytest.approx([0.1, 1.2], abs=1e-14)


def test_server_step() -> None:
    assert hand(1, option=1, mu=1, eta=0.5).x.tolist() == pytest.approx([0.125, 0.75], abs=1e-14)
    assert hand(1, eta=0.5).x.tolist() == pytest.approx([0.125 / L1, 0.75 / L1], abs=1e-14)


def test_trace() -> None:
    """g and its length; x down; g (2), value and vector (3) and l (1) up; option 1 needs no l."""
    trace = hand(1).trace
    assert trace["train_loss"][1] == pytest.approx(1 / 8 + 3 / 2, rel=1e-14)
    assert trace["grad_norm"][1] == pytest.approx(math.hypot(0.25, 1.5), rel=1e-14)
    assert trace["bytes_down"][1] == 2 * 2 * 8
    assert trace["bytes_up"][1] == 2 * (2 + 3 + 1) * 8
    assert hand(1, option=1).trace["bytes_up"][1] == 2 * (2 + 3) * 8
    assert hand(1, compressor="topk:1").trace["bytes_up"][1] == 2 * ((2 + 1 + 1) * 8 + 4)


def test_a_first_hessian_costs_its_triangle(quad: Federation) -> None:
    trace = simulate(quad, "linear", FedNL(option=2), rounds=2, **OPTIONS).trace
    assert trace["bytes_up"][1:].tolist() == [4 * (6 + 21 + 1) * 8, 4 * (6 + 7 + 1) * 8]


@pytest.mark.parametrize("option", [1, 2])
@pytest.mark.parametrize("compressor", ["none", "rank:6", "topk:21", "powersgd:6", "randk:21"])
def test_without_loss_the_second_step_is_newtons(
    quad: Federation, option: int, compressor: str
) -> None:
    fields: dict[str, Any] = {"option": option, "mu": 0.01, "compressor": compressor}
    assert (run(quad, 1, **fields) - quad.optimum).norm() > 0.1
    torch.testing.assert_close(run(quad, 2, **fields), quad.optimum, rtol=0, atol=1e-10)


@pytest.mark.parametrize("option", [1, 2])
def test_with_first_hessians_the_first_step_is_newtons(quad: Federation, option: int) -> None:
    x = run(quad, 1, option=option, mu=0.01, first="hessian")
    torch.testing.assert_close(x, quad.optimum, rtol=0, atol=1e-10)


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_full_rank_is_no_compression(quad: Federation, rounds: int) -> None:
    torch.testing.assert_close(
        run(quad, rounds, compressor="rank:6", a=0.7),
        run(quad, rounds, compressor="none", a=0.7),
        rtol=0,
        atol=1e-10,
    )


@pytest.mark.parametrize("option", [1, 2])
@pytest.mark.parametrize(("R", "a"), [(1, 1.0), (2, 1.0), (1, 0.4)])
def test_the_papers_algorithm(quad: Federation, option: int, R: int, a: float) -> None:
    for rounds in (1, 4, 7):
        x = run(quad, rounds, option=option, mu=0.3, compressor=f"rank:{R}", a=a)
        torch.testing.assert_close(x, textbook(quad, rounds, option, R, a, 0.3), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("compressor", "rounds"),
    [("rank:1", 8), ("topk:5", 7), ("topk:0.2", 8), ("powersgd:1", 30), ("randk:14", 25)],
)
def test_the_limit_is_the_minimiser(quad: Federation, compressor: str, rounds: int) -> None:
    """Six eigenvalues are learnt one by one, 21 entries by fives (or fours), or by chance."""
    x = run(quad, rounds, compressor=compressor)
    torch.testing.assert_close(x, quad.optimum, rtol=0, atol=1e-10)


def test_learning_rates_of_stacked_trials_are_their_own(quad: Federation) -> None:
    rates = (1.0, 0.4)
    for compressor in ("rank:1", "randk:10"):
        together = compare(
            quad,
            "linear",
            [FedNL(compressor=compressor, a=a, **COLD) for a in rates],
            rounds=4,
            **OPTIONS,
        )
        for a, one in zip(rates, together, strict=True):
            torch.testing.assert_close(
                one.x, run(quad, 4, compressor=compressor, a=a), rtol=0, atol=1e-12
            )


def test_the_limit_of_a_curved_problem_is_the_minimiser() -> None:
    fed = load("synthetic", kind="logistic", clients=4, dim=5)
    x = simulate(
        fed, "linear", FedNL(compressor="rank:2", option=2), loss="bce", rounds=12, **OPTIONS
    ).x
    torch.testing.assert_close(x, fed.optimum, rtol=0, atol=1e-10)


def test_a_trial_that_diverges_harms_no_neighbour(fed: Federation) -> None:
    """Logits of 1e99 make the next Hessian NaN, which no decomposition may stumble over."""
    fields = [{"option": option, "mu": 0.1, "first": "zero"} for option in (1, 2)]
    for option in fields:
        pair = compare(
            fed, "mclr", [FedNL(**option), FedNL(eta=1e99, **option)], rounds=4, **OPTIONS
        )
        alone = simulate(fed, "mclr", FedNL(**option), rounds=4, **OPTIONS)
        torch.testing.assert_close(pair[0].x, alone.x, rtol=1e-10, atol=0)
        assert pair[0].diverged is None
        assert pair[1].diverged is not None


def test_it_needs_every_client(quad: Federation) -> None:
    with pytest.raises(InputError, match="fednl-pp"):
        simulate(quad, "linear", FedNL(), rounds=1, participation=0.5, **OPTIONS)


def test_a_model_out_of_reach_is_refused() -> None:
    with pytest.raises(InputError, match="use fedsso"):
        FedNL().server_init(torch.empty(1, 20_001, device="meta"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"option": 3}, "option must be 1 or 2"),
        ({"eta": 0}, "eta must be > 0"),
        ({"mu": 0}, "mu must be > 0"),
        ({"a": 0}, "a must be > 0"),
        ({"compressor": "rank:0"}, "unknown compressor"),
        ({"first": "one"}, "unknown first"),
    ],
)
def test_wrong_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FedNL(**fields)


# ---- the defaults, and clients that send their Hessian less often ----


def logistic() -> Federation:
    """Four clients in five dimensions, with a minimiser that is known."""
    found: Federation = load("synthetic", kind="logistic", clients=4, dim=5)
    return found


def traced(rounds: int, **fields: Any) -> Run:
    result: Run = simulate(
        logistic(), "linear", FedNL(**fields), loss="bce", rounds=rounds, **OPTIONS
    )
    return result


def test_the_default_starts_from_the_clients_hessians_with_the_penalty_as_mu(
    quad: Federation,
) -> None:
    """On a quadratic that is Newton's method: the first step ends at the minimiser of f + l2/2
    |x|^2, (H + l2 I)^-1 H x*. With l2 far below H no eigenvalue is raised."""
    A, Ab = quadratics(quad)
    H, g = torch.einsum("n,nij->ij", quad.p, A), quad.p @ Ab
    expected = torch.linalg.solve(H + 1e-3 * torch.eye(len(H)).double(), g)
    x = simulate(quad, "linear", FedNL(), rounds=1, l2=1e-3, **OPTIONS).x
    torch.testing.assert_close(x, expected, rtol=0, atol=1e-12)


def test_lazy_and_seldom_clients_reach_the_minimiser_with_fewer_bytes() -> None:
    """Each skipped S_i of rank 1 saves 6 numbers: 5 of the vector and a value."""
    fed = logistic()
    usual = traced(30)
    for fields in ({"lazy": 4.0}, {"often": 0.5}):
        one = traced(30, **fields)
        torch.testing.assert_close(one.x, fed.optimum, rtol=0, atol=1e-8)
        saved = usual.trace["bytes_up"][1:] - one.trace["bytes_up"][1:]
        assert saved.sum() > 0
        assert saved[0] == 0
        assert all(gap % (6 * 8) == 0 for gap in saved)
        assert max(saved) <= 4 * 6 * 8


def test_a_client_that_is_lazy_without_patience_is_fednl() -> None:
    """zeta so small that every difference is worth sending: the same bits, the same bytes."""
    lazy, usual = traced(6, lazy=1e-300), traced(6)
    assert torch.equal(lazy.x, usual.x)
    np.testing.assert_array_equal(lazy.trace["bytes_up"], usual.trace["bytes_up"])


def test_what_is_worth_sending() -> None:
    """|lack|^2 = 4 against |change|^2 = 1: worth it below zeta = 4, and in the first round."""
    lack, change = 2 * torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1)
    assert [int(worth(lack, change, zeta, 2)) for zeta in (3.9, 4.0, 4.1)] == [1, 0, 0]
    assert int(worth(lack, change, 4.1, 1)) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"often": 0}, "often must be > 0"),
        ({"often": 1.5}, "often must lie in"),
        ({"often": 0.5, "option": 2}, "needs option=1"),
        ({"lazy": -1}, "lazy must be >= 0"),
    ],
)
def test_wrong_shares(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FedNL(**fields)
