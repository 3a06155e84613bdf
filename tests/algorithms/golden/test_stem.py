"""STEM by hand.

Two clients, one parameter, f_i(x) = A_i/2 (x - b_i)^2 with A_1 = 1, b_1 = 1, p_1 = 1/4 and A_2 = 2,
b_2 = 2, p_2 = 3/4. alpha = 0.1, sigma2 = 0 (eta = 0.1 for ever), c = 1/2 (a = 1/2 after the first
step), tau = 2, y = 0, d = 0.

Round 1   client 1: y 0         d -1                                          loss 1/2
                    y 0.1       d -0.9 + (-1 + 1)/2 = -0.9                    loss 0.405
          client 2: y 0         d -4                                          loss 4
                    y 0.4       d -3.2                                        loss 2.56
          mean y 0.325, d -2.625: model 0.325 + 0.2625 = 0.5875
Round 2   client 1: y 0.5875    d -0.4125 + (-2.625 + 0.675)/2 = -1.3875
                    y 0.72625   d -0.27375 + (-1.3875 + 0.4125)/2 = -0.76125
          client 2: y 0.5875    d -2.825 + (-2.625 + 3.35)/2 = -2.4625
                    y 0.83375   d -2.3325 + (-2.4625 + 2.825)/2 = -2.15125
          mean y 0.806875, d -1.80375: model 0.98725

sigma2 = 7, c = 2, tau = 1: eta_1 = 0.1/8^(1/3) = 0.05, eta_2 = 0.1/15^(1/3), a_1 = 2/4.
Round 1   mean y 0, d = grad f(0) = -3.25: model 0.1625
Round 2   mean y 0.1625, d = -3.25 + 1.75 * 0.1625 = -2.965625
          (the clients' corrections cancel in the mean)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedsso import FedAvg, Federation, Run, simulate
from fedsso.algorithm import Algorithm
from fedsso.algorithms.first_order.stem import STEM
from fedsso.data import quadratic
from fedsso.errors import InputError

OPTIONS: dict[str, Any] = {
    "batch_size": None,
    "dtype": "float64",
    "device": "cpu",
    "eval_every": 1000,
}


def by_hand(rounds: int, tau: int, **values: float) -> Run:
    fed = quadratic([[[1]], [[2]]], [[1], [2]], [0.25, 0.75])
    result: Run = simulate(
        fed, "linear", STEM(alpha=0.1, **values), rounds=rounds, local_steps=tau, **OPTIONS
    )
    return result


def run(fed: Federation, algorithm: Algorithm, rounds: int, tau: int, **options: Any) -> Tensor:
    x: Tensor = simulate(
        fed, "linear", algorithm, rounds=rounds, local_steps=tau, **{**OPTIONS, **options}
    ).x
    return x


def mean_hessian(fed: Federation) -> Tensor:
    a = torch.stack([fed.x[fed.rows_of(i)] for i in range(fed.clients)])
    H: Tensor = torch.einsum("n,nki,nkj->ij", fed.p, a, a) * 2 / a.shape[-1]
    return H


def test_two_rounds() -> None:
    assert by_hand(1, 2, sigma2=0, c=0.5).x.item() == pytest.approx(0.5875, abs=1e-14)
    assert by_hand(2, 2, sigma2=0, c=0.5).x.item() == pytest.approx(0.98725, abs=1e-14)


def test_decay() -> None:
    assert by_hand(1, 1, sigma2=7, c=2).x.item() == pytest.approx(0.1625, abs=1e-14)
    assert by_hand(2, 1, sigma2=7, c=2).x.item() == pytest.approx(
        0.1625 + 0.2965625 / 15 ** (1 / 3), abs=1e-14
    )


def test_trace() -> None:
    trace = by_hand(2, 2, sigma2=0, c=0.5).trace
    assert trace["train_loss"][1] == pytest.approx(0.905 / 8 + 0.75 * 6.56 / 2, rel=1e-14)
    assert trace["grad_norm"][1:].tolist() == pytest.approx([2.625, 1.80375], rel=1e-14)
    assert trace["bytes_down"][1] == 2 * 3 * 8  # x, d and t
    assert trace["bytes_up"][1] == 2 * 2 * 8


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("tau", [1, 4])
def test_without_memory_it_is_fedavg(quad: Federation, tau: int, batch_size: int | None) -> None:
    """a = 1 and a constant step; the model after the server's step is the mean of the clients'
    steps."""
    expected = run(quad, FedAvg(alpha=0.2), 6, tau, batch_size=batch_size)
    x = run(quad, STEM(alpha=0.2, sigma2=0, c=1), 6, tau, batch_size=batch_size)
    torch.testing.assert_close(x, expected, rtol=0, atol=1e-10)


def test_one_full_step_is_gradient_descent_for_any_memory(quad: Federation) -> None:
    """Without noise d stays the gradient of f; the steps are alpha / (1 + sigma2 t)^(1/3), t = 1,
    2, ..."""
    H, x = mean_hessian(quad), torch.zeros(6, dtype=torch.float64)
    assert quad.optimum is not None
    for t in range(1, 8):
        x = x - 0.5 / (1 + 0.3 * t) ** (1 / 3) * H @ (x - quad.optimum)
    torch.testing.assert_close(
        run(quad, STEM(alpha=0.5, sigma2=0.3, c=0.4), 7, 1), x, rtol=0, atol=1e-10
    )


def test_alike_clients_take_all_local_steps_of_gradient_descent(quad: Federation) -> None:
    H, best = mean_hessian(quad), quad.optimum
    assert best is not None
    fed = quadratic(torch.stack([H, H]), torch.stack([best, best]), [0.3, 0.7])
    x = torch.zeros(6, dtype=torch.float64)
    for t in range(1, 13):
        x = x - 0.5 / (1 + 0.3 * t) ** (1 / 3) * H @ (x - best)
    torch.testing.assert_close(
        run(fed, STEM(alpha=0.5, sigma2=0.3, c=0.4), 3, 4), x, rtol=0, atol=1e-10
    )


def test_memory_removes_the_noise_of_mini_batches(quad: Federation) -> None:
    """One step a round of the same size: the loss settles much nearer its minimum than FedAvg's."""
    options: dict[str, Any] = {**OPTIONS, "local_steps": 1, "eval_every": 1, "eval_train": True}

    def loss(algorithm: Algorithm, batch_size: int | None) -> float:
        trace = simulate(
            quad, "linear", algorithm, rounds=45, **{**options, "batch_size": batch_size}
        ).trace
        return float(trace["full_train_loss"][-15:].mean())

    least = loss(FedAvg(alpha=1.0), None)
    assert loss(STEM(alpha=0.3, sigma2=0, c=0.2), 2) - least < 0.2 * (
        loss(FedAvg(alpha=0.3), 2) - least
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"alpha": 0}, "alpha must be > 0"),
        ({"c": 0}, "c must be > 0"),
        ({"sigma2": -1}, "sigma2 must be >= 0"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        STEM(**values)
