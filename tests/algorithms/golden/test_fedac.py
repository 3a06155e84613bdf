"""FedAc by hand.

Two clients, one parameter, f_i(x) = A_i/2 (x - b_i)^2 with A_1 = 1, b_1 = 1, p_1 = 1/4 and A_2 = 2,
b_2 = 2, p_2 = 3/4. alpha = 0.1, a = b = 2, gamma = 0.2, tau = 2, x = w = 0: in each step md = (w +
x)/2, x = md - 0.1 g, w = w/2 + md/2 - 0.2 g.

Round 1   client 1: md 0        g -1           x 0.1           w 0.2
                    md 0.15     g -0.85        x 0.235         w 0.1 + 0.075 + 0.17 = 0.345
          client 2: md 0        g -4           x 0.4           w 0.8
                    md 0.6      g -2.8         x 0.88          w 0.4 + 0.3 + 0.56 = 1.26
          mean x 0.71875, w 1.03125            losses (1/2 + 0.85^2/2)/2 and (4 + 1.4^2)/2
Round 2   client 1: md 0.875      g -0.125     x 0.8875        w 0.978125
                    md 0.9328125  g -0.0671875 x 0.93953125
          client 2: md 0.875      g -2.25      x 1.1           w 1.403125
                    md 1.2515625  g -1.496875  x 1.40125
          mean x 0.2348828125 + 1.0509375 = 1.2858203125

Couplings for alpha = 0.1, mu = 1.25, K = 2: gamma = max(0.1, sqrt(0.1/2.5)) = 0.2, gamma mu = 1/4;
I: a = 4, b = 5; II: a = 6 - 1/2 = 5.5, b = (2 * 30.25 - 1)/4.5 = 119/9.
For mu = 8: gamma = max(0.1, sqrt(0.1/16)) = 0.1; I: a = 1.25, b = 2.25.
"""

from __future__ import annotations

from math import exp
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsso import FedAvg, Federation, FedSGD, Run, simulate
from fedsso.algorithm import Algorithm
from fedsso.algorithms.first_order.fedac import FedAC
from fedsso.data import quadratic
from fedsso.errors import InputError

OPTIONS: dict[str, Any] = {
    "batch_size": None,
    "dtype": "float64",
    "device": "cpu",
    "eval_every": 1000,
}


def by_hand(rounds: int, algorithm: Algorithm) -> Run:
    fed = quadratic([[[1]], [[2]]], [[1], [2]], [0.25, 0.75])
    result: Run = simulate(fed, "linear", algorithm, rounds=rounds, local_steps=2, **OPTIONS)
    return result


def run(fed: Federation, algorithm: Algorithm, rounds: int, tau: int) -> Tensor:
    x: Tensor = simulate(fed, "linear", algorithm, rounds=rounds, local_steps=tau, **OPTIONS).x
    return x


def mean_hessian(fed: Federation) -> Tensor:
    a = torch.stack([fed.x[fed.rows_of(i)] for i in range(fed.clients)])
    H: Tensor = torch.einsum("n,nki,nkj->ij", fed.p, a, a) * 2 / a.shape[-1]
    return H


def test_two_rounds() -> None:
    algorithm = FedAC(alpha=0.1, a=2, b=2, gamma=0.2)
    assert by_hand(1, algorithm).x.item() == pytest.approx(0.71875, abs=1e-14)
    assert by_hand(2, algorithm).x.item() == pytest.approx(1.2858203125, abs=1e-14)


def test_trace() -> None:
    trace = by_hand(1, FedAC(alpha=0.1, a=2, b=2, gamma=0.2)).trace
    assert trace["train_loss"][1] == pytest.approx(
        (0.5 + 0.85**2 / 2) / 8 + 0.75 * (4 + 1.4**2) / 2, rel=1e-14
    )
    assert trace["grad_norm"][1] == pytest.approx(0.71875 / 0.2, rel=1e-14)
    assert (
        trace["bytes_up"][1] == trace["bytes_down"][1] == 2 * 2 * 8
    )  # x and w, in the first round as well


@pytest.mark.parametrize(
    ("values", "a", "b", "gamma"),
    [
        ({"mu": 1.25}, 4, 5, 0.2),
        ({"mu": 1.25, "option": "II"}, 5.5, 119 / 9, 0.2),
        ({"mu": 8.0}, 1.25, 2.25, 0.1),
        ({"mu": 1.25, "a": 3}, 3, 4, 0.2),
        ({"mu": 1.25, "a": 3, "option": "II"}, 3, 8.5, 0.2),
        ({"mu": 1.25, "gamma": 0.4}, 2, 3, 0.4),
    ],
)
def test_couplings(values: dict[str, Any], a: float, b: float, gamma: float) -> None:
    expected = by_hand(3, FedAC(alpha=0.1, a=a, b=b, gamma=gamma)).x.item()
    assert by_hand(3, FedAC(alpha=0.1, **values)).x.item() == pytest.approx(expected, abs=1e-13)


@pytest.mark.parametrize("tau", [1, 4])
def test_without_coupling_it_is_fedavg(quad: Federation, tau: int) -> None:
    expected = run(quad, FedAvg(alpha=0.3), 6, tau)
    x = run(quad, FedAC(alpha=0.3, a=1, b=1, gamma=0.3), 6, tau)
    torch.testing.assert_close(x, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("option", ["I", "II"])
def test_one_step_is_accelerated_gradient_descent(quad: Federation, option: str) -> None:
    """The recursion on f = sum p_i f_i itself, with K = 1."""
    H, best = mean_hessian(quad), quad.optimum
    assert best is not None
    alpha, mu = 0.5, 0.2
    gamma = (alpha / mu) ** 0.5
    a = 1 / (gamma * mu) if option == "I" else 1.5 / (gamma * mu) - 0.5
    b = a + 1 if option == "I" else (2 * a * a - 1) / (a - 1)
    x = w = torch.zeros(6, dtype=torch.float64)
    for _ in range(8):
        md = w / b + (1 - 1 / b) * x
        g = H @ (md - best)
        x, w = md - alpha * g, (1 - 1 / a) * w + md / a - gamma * g
    result = run(quad, FedAC(alpha=alpha, mu=mu, option=option), 8, 1)
    torch.testing.assert_close(result, x, rtol=0, atol=1e-10)


@pytest.mark.parametrize("option", ["I", "II"])
def test_acceleration(option: str) -> None:
    """Condition 100, K = 1, alpha = 1/L: after n steps f - f* <= exp(-n sqrt(alpha mu)) (f - f* +
    mu/2 |x - x*|^2 at 0) for I, a third of the exponent for II; gradient descent has alpha mu
    instead of its root."""
    L = torch.diag(torch.logspace(-2, 0, 6, dtype=torch.float64))
    fed = quadratic(torch.stack([L, L]), torch.tensor([[1.0] * 6, [-2.0] * 6]), [0.25, 0.75])
    best, rounds = fed.optimum, 60
    assert best is not None

    def gap(x: Tensor) -> float:
        return float((x - best) @ L @ (x - best)) / 2

    start = gap(torch.zeros(6, dtype=torch.float64)) + 0.01 / 2 * float(best @ best)
    power = 0.1 if option == "I" else 0.1 / 3
    fast = gap(run(fed, FedAC(alpha=1.0, mu=0.01, option=option), rounds, 1))
    assert fast <= exp(-rounds * power) * start
    assert fast < 0.1 * gap(run(fed, FedSGD(alpha=1.0), rounds, 1))


def test_local_steps_accelerate_as_well() -> None:
    """Alike clients, tau = 5: fewer rounds than FedAvg."""
    L = torch.diag(torch.logspace(-2, 0, 6, dtype=torch.float64))
    fed = quadratic(torch.stack([L, L]), torch.ones(2, 6))
    assert fed.optimum is not None
    error = [
        float((run(fed, kind, 12, 5) - fed.optimum).norm())
        for kind in (FedAC(alpha=1.0, mu=0.01), FedAvg(alpha=1.0))
    ]
    assert error[0] < 0.5 * error[1]


def test_each_straggler_couples_by_its_own_steps(quad: Federation) -> None:
    """Then the result does not depend on which clients are computed together."""
    options: dict[str, Any] = {**OPTIONS, "rounds": 4, "local_steps": 5, "stragglers": 1.0}
    x, y = (
        simulate(quad, "linear", FedAC(alpha=0.1, mu=0.5), engine=e, **options).x
        for e in ("stacked", "loop")
    )
    torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"alpha": 0}, "alpha must be > 0"),
        ({"mu": 0}, "mu must be > 0"),
        ({"gamma": -1}, "gamma must be > 0"),
        ({"option": "III"}, "unknown option 'III'"),
        ({"option": "II", "a": 1}, "option II needs a > 1, got a=1"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FedAC(**values)
