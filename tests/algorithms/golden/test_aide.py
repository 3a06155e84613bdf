"""AIDE by hand.

On quadratics a client's minimiser is w_i = x - (A_i + (mu + tau) I)^-1 g for g = grad f(x) + tau (x
- y). One parameter, A = (1, 3), b = (1, 1), p = (1/2, 1/2), tau = 1, mu = 0, q = 1/9: zeta = 1/3,
beta = (1 - 1/3) / (1 + 1/3) = 1/2. The mean inverse is (1/2 + 1/4) / 2 = 3/8, grad f = 2 (x - 1).

Round 1   x = y = 0: g = -2, x = 3/4, y = 3/4 + 1/2 * 3/4 = 9/8
Round 2   g = -1/2 + (3/4 - 9/8) = -7/8, x = 3/4 + 21/64 = 69/64, y = 69/64 + 1/2 * 21/64 = 159/128
Round 3   g = 10/64 + (138 - 159)/128 = -1/128, x = 69/64 + 3/1024 = 1107/1024

Two inner steps in a round: the second from z = 3/4 with y = 0 still: g = -1/2 + 3/4 = 1/4,
z = 3/4 - 3/32 = 21/32, which is x; y = 21/32 * 3/2 = 63/64.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from quadratics import OPTIONS, START, close, go, parts, trio

from fedsso import Federation, InputError, simulate
from fedsso.algorithm import Attendance
from fedsso.algorithms.second_order.aide import AIDE, momentum
from fedsso.algorithms.second_order.dane import DANE
from fedsso.data import quadratic

EXACT: dict[str, Any] = {"newton_steps": 1, "tol": 1e-14}


def line() -> Federation:
    return quadratic([[[1]], [[3]]], [[1], [1]])


@pytest.mark.parametrize(("rounds", "x"), [(1, 3 / 4), (2, 69 / 64), (3, 1107 / 1024)])
def test_three_rounds(rounds: int, x: float) -> None:
    result = go(line(), AIDE(tau=1, q=1 / 9, **EXACT), rounds)
    assert result.x.item() == pytest.approx(x, abs=1e-14)
    assert result.trace["grad_norm"][1] == pytest.approx(2, rel=1e-14)
    assert result.trace["bytes_up"][1] == result.trace["bytes_down"][1] == 2 * 2 * 8


def test_two_inner_steps() -> None:
    result = go(line(), AIDE(tau=1, q=1 / 9, inner=2, **EXACT), 1)
    assert result.x.item() == pytest.approx(21 / 32, abs=1e-14)
    assert result.trace["bytes_up"][1] == result.trace["bytes_down"][1] == 2 * 4 * 8


@pytest.mark.parametrize(
    ("mu", "points"),
    [
        (
            0,
            [
                (1.3813636363636355, -0.210454545454545),
                (0.041342866474332496, 0.608663282948806),
                (-0.1967853955130319, 0.5103075950980103),
            ],
        ),
        (
            0.5,
            [
                (1.8551089588377718, -0.660302003081664),
                (0.563925997966038, 0.2892678098537642),
                (0.08789040060153003, 0.43588738970046226),
            ],
        ),
    ],
)
def test_three_quadratics(mu: float, points: list[tuple[float, float]]) -> None:
    """lambda = 1/4 and tau = 1, so that q = 1/5."""
    for k, point in enumerate(points, 1):
        x = go(trio(), AIDE(tau=1, mu=mu, q=0.2, **EXACT), k).x
        assert (x + torch.tensor(START)).tolist() == pytest.approx(point, abs=1e-12)


def test_momentum() -> None:
    """zeta = 0.5 at first and q = 0.2: to sqrt(0.2), with which beta stays as it is."""
    expected = [
        (0.475624609863, 0.344530762328),
        (0.462695854263, 0.362027211719),
        (0.455705738528, 0.371171883576),
        (0.451888005344, 0.376068327242),
    ]
    zeta = torch.tensor(0.5, dtype=torch.float64)
    for pair in expected:
        zeta, beta = momentum(zeta, 0.2)
        assert (float(zeta), float(beta)) == pytest.approx(pair, abs=1e-11)
    fixed, beta = momentum(torch.tensor(math.sqrt(0.2), dtype=torch.float64), 0.2)
    assert float(fixed) == pytest.approx(math.sqrt(0.2), rel=1e-14)
    assert float(beta) == pytest.approx((1 - math.sqrt(0.2)) / (1 + math.sqrt(0.2)), rel=1e-14)


@pytest.mark.parametrize("zeta", [0, 0.5])
def test_quadratics(quad: Federation, zeta: float) -> None:
    """x - sum p_i (A_i + (mu + tau) I)^-1 (grad f(x) + tau (x - y))."""
    A, Ab = parts(quad)
    tau, mu, q = 0.4, 0.1, 0.2
    x = y = torch.zeros(6, dtype=torch.float64)
    weight = torch.tensor(zeta or math.sqrt(q), dtype=torch.float64)
    for k in range(1, 4):
        g = torch.einsum("n,ni->i", quad.p, A @ x - Ab) + tau * (x - y)
        M = A + (mu + tau) * torch.eye(6, dtype=torch.float64)
        w = x - quad.p @ torch.linalg.solve(M, g.expand(4, 6))
        weight, beta = momentum(weight, q)
        x, y = w, w + beta * (w - x)
        close(go(quad, AIDE(tau=tau, mu=mu, q=q, zeta=zeta, **EXACT), k).x, x)


# ---- reductions ----


@pytest.mark.parametrize("l2", [0.0, 0.1])
def test_without_tau_it_is_dane(fed: Federation, l2: float) -> None:
    ours, theirs = (
        simulate(fed, "mclr", record, rounds=3, l2=l2, **OPTIONS)
        for record in (AIDE(tau=0, mu=0.2, newton_steps=2), DANE(mu=0.2, newton_steps=2))
    )
    assert torch.equal(ours.x, theirs.x)


def test_equal_hessians_need_one_round_without_tau(quad: Federation) -> None:
    A = parts(quad)[0][:1].expand(4, 6, 6)
    fed = quadratic(A, torch.linspace(-1, 1, 24).view(4, 6), quad.p)
    assert fed.optimum is not None
    close(go(fed, AIDE(tau=0, **EXACT), 1).x, fed.optimum)


def test_q_comes_from_the_penalty() -> None:
    record = AIDE(tau=0.3)
    assert record.join(Attendance(l2=0.1), 1).q == pytest.approx(0.25)
    assert record.join(Attendance(), 1).q == 0.01
    assert AIDE(q=0.5).join(Attendance(l2=0.1), 1).q == 0.5


# ---- behaviour ----


FLAT = 0.3


def unlike() -> Federation:
    """Four quadratics with eigenvalues in [1, 20] and eigenvectors of their own in six dimensions;
    in a seventh all have the curvature 0.3."""
    draw = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(4, 6, 6, generator=draw, dtype=torch.float64)).Q
    values = 1 + 19 * torch.rand(4, 6, generator=draw, dtype=torch.float64)
    values[:, 0], values[:, -1] = 1, 20
    A = torch.zeros(4, 7, 7, dtype=torch.float64)
    A[:, 1:, 1:] = (Q * values.unsqueeze(-2)) @ Q.mT
    A[:, 0, 0] = FLAT
    b = torch.randn(4, 7, generator=draw, dtype=torch.float64)
    return quadratic((A + A.mT) / 2, b, [0.4, 0.3, 0.2, 0.1])


def gap(fed: Federation, record: AIDE | DANE, rounds: int) -> float:
    assert fed.optimum is not None
    return float((go(fed, record, rounds, eval_every=rounds).x - fed.optimum).norm())


def test_converges_where_dane_diverges_and_in_half_of_its_rounds() -> None:
    """DANE with mu = 0 moves away. Where mu is large enough for unlike clients, it creeps along the
    flat direction, by mu / (mu + 0.3) in a round: at its best mu it needs twice AIDE's rounds."""
    fed = unlike()
    assert gap(fed, DANE(mu=0, **EXACT), 6) > 10 * gap(fed, DANE(mu=0, **EXACT), 2)
    ours = gap(fed, AIDE(tau=2, q=FLAT / (FLAT + 2), **EXACT), 30)
    best = min(gap(fed, DANE(mu=mu, **EXACT), 60) for mu in (1, 1.5, 2, 2.5, 3, 5))
    assert ours <= best / 2


# ---- what is refused ----


def test_refuses_a_part_of_the_clients(quad: Federation) -> None:
    with pytest.raises(InputError, match=r"needs all clients .* or feddane"):
        go(quad, AIDE(), 1, participation=0.5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tau": -1},
        {"mu": -1},
        {"q": 2},
        {"zeta": 1.5},
        {"tol": -1},
        {"inner": 0},
        {"newton_steps": 0},
        {"cg_steps": 0},
    ],
)
def test_wrong_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(wrong))} must be"):
        AIDE(**wrong)
