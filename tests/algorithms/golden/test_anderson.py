"""Anderson acceleration by hand.

Two clients, one parameter, f_i(x) = a_i/2 (x - b_i)^2:

    a_1 = 1, b_1 = 1, p_1 = 1/4        a_2 = 3, b_2 = 0, p_2 = 3/4

alpha = 0.1, tau = 1, eta = 1, x_1 = 0. A FedAvg round moves x by r(x) = -0.1 ((x - 1)/4 + 9 x/4) =
0.025 - 0.25 x.

Round 1   r = 0.025, no difference yet: x_2 = 0.025
Round 2   r = 0.01875, dX = 0.025, dR = -0.00625, gamma = r/dR = -3
          x_3 = 0.025 + 0.01875 - (0.025 - 0.00625)(-3) = 0.04375 + 0.05625 = 0.1, where r = 0

eta = 1/2: x_2 = 0.0125, r = 0.021875, dR = -0.003125, gamma = -7,
x_3 = 0.0125 + 0.0109375 + 7 (0.0125 - 0.0015625) = 0.1 again.
reg = 1 halves gamma: x_3 = 0.04375 + 0.01875 * 1.5 = 0.071875.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsso import Federation, InputError, simulate
from fedsso.algorithms import Anderson, FedAvg
from fedsso.data import quadratic

EXACT: dict[str, Any] = {"batch_size": None, "dtype": "float64", "device": "cpu"}


def fly(
    fed: Federation, algorithm: Any, rounds: int, model: Any = "linear", **options: Any
) -> Tensor:
    x: Tensor = simulate(fed, model, algorithm, rounds=rounds, **{**EXACT, **options}).x
    return x


def by_hand(rounds: int, **values: Any) -> float:
    fed = quadratic([[[1]], [[3]]], [[1], [0]], [0.25, 0.75])
    return float(fly(fed, Anderson(alpha=0.1, **{"reg": 0.0, **values}), rounds, local_steps=1))


def test_two_rounds() -> None:
    assert by_hand(1) == pytest.approx(0.025, abs=1e-14)
    assert by_hand(2) == pytest.approx(0.1, abs=1e-14)
    assert by_hand(2, reg=1e-10) == pytest.approx(0.1, abs=1e-10)


def test_mixing_and_regularisation() -> None:
    assert by_hand(1, eta=0.5) == pytest.approx(0.0125, abs=1e-14)
    assert by_hand(2, eta=0.5) == pytest.approx(0.1, abs=1e-14)
    assert by_hand(2, reg=1.0) == pytest.approx(0.071875, abs=1e-14)


def round_map(fed: Federation, alpha: float, tau: int) -> tuple[Tensor, Tensor]:
    """M and c of the residual r(x) = c - M x of FedAvg's round on quadratics."""
    M, c = torch.zeros(6, 6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    I = torch.eye(6, dtype=torch.float64)
    for i, p in enumerate(fed.p):
        a, y = fed.x[fed.rows_of(i)].double(), fed.y[fed.rows_of(i)].double()
        A = 2 * a.mT @ a / 6
        P = p * (I - torch.linalg.matrix_power(I - alpha * A, tau))
        M, c = M + P, c + P @ torch.linalg.solve(a, y)
    return M, c


@pytest.mark.parametrize(("alpha", "tau"), [(0.3, 4), (0.9, 3)])
def test_a_linear_round_map_is_solved_in_one_round_more_than_parameters(
    quad: Federation, alpha: float, tau: int
) -> None:
    M, c = round_map(quad, alpha, tau)
    fixed = torch.linalg.solve(M, c)
    x = fly(quad, Anderson(alpha=alpha, m=6, reg=0.0), 7, local_steps=tau)
    assert float((x - fixed).norm() / fixed.norm()) < 1e-8
    slow = fly(quad, FedAvg(alpha=alpha), 7, local_steps=tau)
    assert float((slow - fixed).norm() / fixed.norm()) > 1e-3


@pytest.mark.parametrize(("alpha", "tau"), [(0.5, 1), (0.3, 4), (0.9, 3)])
@pytest.mark.parametrize("eta", [1.0, 0.5])
def test_the_default_regularisation_costs_one_more_round(
    quad: Federation, alpha: float, tau: int, eta: float
) -> None:
    M, c = round_map(quad, alpha, tau)
    fixed = torch.linalg.solve(M, c)
    x = fly(quad, Anderson(alpha=alpha, eta=eta, m=6), 8, local_steps=tau)
    assert float((x - fixed).norm() / fixed.norm()) < 1e-8


def test_it_is_gmres_and_a_fedavg_round(quad: Federation) -> None:
    """x_{k+2} = v + r(v), where v has the least residual in x_1 + span(r_1, M r_1, ..., M^{k-1}
    r_1)."""
    M, c = round_map(quad, 0.3, 4)
    K = c[:, None]  # x_1 = 0, so r_1 = c
    for k in range(1, 5):
        v = K @ torch.linalg.lstsq(M @ K, c[:, None]).solution
        expected = (v + c[:, None] - M @ v)[:, 0]
        x = fly(quad, Anderson(alpha=0.3, m=10, reg=0.0, cosine=-1), k + 1, local_steps=4)
        torch.testing.assert_close(x, expected, rtol=0, atol=1e-10)
        K = torch.cat((K, (M @ K[:, -1:])), 1)


def test_the_oldest_difference_leaves(quad: Federation) -> None:
    """Type II with a window of two, by least squares on the last three rounds alone."""
    M, c = round_map(quad, 0.5, 2)
    points = [torch.zeros(6, dtype=torch.float64)]
    for _ in range(6):
        x, r = points[-1], c - M @ points[-1]
        past = torch.stack(points[-3:])
        step = r
        if len(past) > 1:
            dX, dR = past.diff(dim=0).mT, (c - past @ M.mT).diff(dim=0).mT
            gamma = torch.linalg.lstsq(dR, r[:, None]).solution
            step = r - ((dX + dR) @ gamma)[:, 0]
        points.append(x + step)
    algorithm = Anderson(alpha=0.5, m=2, reg=0.0, cosine=-1)
    for k in (2, 3, 6):
        torch.testing.assert_close(
            fly(quad, algorithm, k, local_steps=2), points[k], rtol=0, atol=1e-10
        )


def test_the_first_round_is_fedavgs(fed: Federation) -> None:
    options: dict[str, Any] = {"local_steps": 3, "batch_size": 4}
    for eta in (1.0, 0.3):
        x = fly(fed, Anderson(alpha=0.1, eta=eta), 1, "mlp", **options)
        assert torch.equal(x, fly(fed, FedAvg(alpha=0.1, eta=eta), 1, "mlp", **options))


def test_rounds_that_nobody_answers_leave_no_trace(quad: Federation) -> None:
    """Whichever round is the first with an answer, it is FedAvg's."""
    options: dict[str, Any] = {"drop_rate": 0.95, "seed": 3, "rounds": 12, **EXACT}
    run = simulate(quad, "linear", Anderson(alpha=0.1), **options)
    first = next(k for k, sent in enumerate(run.trace["bytes_up"]) if sent > 0)
    assert first > 1
    options["rounds"] = first
    x = simulate(quad, "linear", Anderson(alpha=0.1), **options).x
    assert torch.equal(x, simulate(quad, "linear", FedAvg(alpha=0.1), **options).x)


def test_a_step_against_the_residual_is_replaced() -> None:
    """f = (w_2 tanh(w_1) - 2.5)^2 has a saddle at 0: there r vanishes, and without the test the
    model goes there."""
    one = torch.ones(1, 1, dtype=torch.float64)
    fed = Federation.from_clients([(one, 2.5 * one[0])], test_fraction=0)
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Tanh(), nn.Linear(1, 1, bias=False))
    options: dict[str, Any] = {"model": model, "local_steps": 1, "init": torch.tensor([0.1, 0.1])}
    bare, safe = (fly(fed, Anderson(alpha=0.05, cosine=c), 40, **options) for c in (-1.0, 0.1))
    assert bare.tolist() == pytest.approx([0, 0], abs=1e-6)
    assert float(safe[1] * safe[0].tanh()) == pytest.approx(2.5, abs=1e-6)


def test_trace(quad: Federation) -> None:
    trace = simulate(quad, "linear", Anderson(alpha=0.5), rounds=1, local_steps=2, **EXACT).trace
    _, c = round_map(quad, 0.5, 2)
    assert trace["grad_norm"][1] == pytest.approx(float(c.norm()), rel=1e-12)
    assert trace["bytes_up"][1] == trace["bytes_down"][1] == 4 * 6 * 8


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"m": 0}, "m must be an integer >= 1, got m=0"),
        ({"reg": -1e-3}, "reg must be >= 0 and finite, got reg=-0.001"),
        ({"cosine": 1}, r"cosine.*in \[-1, 1\).*cosine=1.*-1 keeps every step"),
        ({"cosine": float("nan")}, r"cosine must be in \[-1, 1\), got cosine=nan"),
        ({"eta": 0}, "eta must be > 0 and finite, got eta=0"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Anderson(**values)
