"""FedAdaGrad, FedAdam, FedYogi and FedAvgM by hand.

Two clients, one parameter, f_i(x) = A_i/2 (x - b_i)^2 with A_1 = 5/2, p_1 = 1/4 and A_2 = 1/2, p_2
= 3/4, so that sum p_i A_i = 1; b_1 = 4/5 B and b_2 = 4/3 B, so that sum p_i A_i b_i = B. alpha =
1/2, one local step, x_1 = 0:

    delta = (B - x) / 2

FedAdaGrad   B = 0.6, eta = 9, eps = 0.4, beta1 = 0; v = 0.16 before the first round
    Round 1  delta = 0.3     v = 0.16 + 0.09 = 0.25     x = 9 * 0.3 / (0.5 + 0.4) = 3
    Round 2  delta = -1.2    v = 0.25 + 1.44 = 1.69     x = 3 - 9 * 1.2 / (1.3 + 0.4) = -57/17
    beta1 = 1/2
    Round 1  m = 0.15        x = 9 * 0.15 / 0.9 = 1.5
    Round 2  delta = -0.45   v = 0.4525   m = 0.075 - 0.225 = -0.15
                             x = 1.5 - 1.35 / (sqrt(0.4525) + 0.4)

FedAdam      B = 1.4, eta = 1.2, eps = 0.1, beta1 = beta2 = 1/2; v = 0.01
    Round 1  delta = 0.7     v = 0.005 + 0.245 = 0.25   m = 0.35       x = 1.2 * 0.35 / 0.6 = 0.7
    Round 2  delta = 0.35    v = 0.125 + 0.06125        m = 0.35
                             x = 0.7 + 0.42 / (sqrt(0.18625) + 0.1)

FedYogi      B = 0.8, eta = 0.8, eps = 0.1, beta1 = beta2 = 1/2; v = 0.01
    Round 1  delta = 0.4     delta^2 > v: v = 0.01 + 0.08 = 0.09   m = 0.2
                             x = 0.8 * 0.2 / 0.4 = 0.4
    Round 2  delta = 0.2     delta^2 < v: v = 0.09 - 0.02 = 0.07   m = 0.2
                             x = 0.4 + 0.16 / (sqrt(0.07) + 0.1)

FedAvgM      B = 0.6, eta = beta1 = 1/2
    Round 1  delta = 0.3     m = 0.3                    x = 0.15
    Round 2  delta = 0.225   m = 0.15 + 0.225 = 0.375   x = 0.15 + 0.1875 = 0.3375
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest
import torch

from fedsso import FedAvg, Federation, Run, simulate
from fedsso.algorithm import Algorithm
from fedsso.algorithms.first_order.fedopt import FedAdaGrad, FedAdam, FedAvgM, FedYogi
from fedsso.data import quadratic
from fedsso.errors import InputError

OPTIONS: dict[str, Any] = {
    "batch_size": None,
    "dtype": "float64",
    "device": "cpu",
    "eval_every": 1000,
}


def by_hand(B: float, algorithm: Algorithm, rounds: int) -> Run:
    fed = quadratic([[[2.5]], [[0.5]]], [[0.8 * B], [B / 0.75]], [0.25, 0.75])
    result: Run = simulate(fed, "linear", algorithm, rounds=rounds, local_steps=1, **OPTIONS)
    return result


def run(fed: Federation, algorithm: Algorithm, rounds: int) -> torch.Tensor:
    x: torch.Tensor = simulate(fed, "linear", algorithm, rounds=rounds, local_steps=3, **OPTIONS).x
    return x


ADAGRAD = {"alpha": 0.5, "eta": 9, "eps": 0.4}
HALF = {"alpha": 0.5, "beta1": 0.5, "beta2": 0.5, "eps": 0.1}


@pytest.mark.parametrize(
    ("B", "algorithm", "one", "two"),
    [
        (0.6, FedAdaGrad(**ADAGRAD, beta1=0), 3, -57 / 17),
        (0.6, FedAdaGrad(**ADAGRAD, beta1=0.5), 1.5, 1.5 - 1.35 / (sqrt(0.4525) + 0.4)),
        (1.4, FedAdam(**HALF, eta=1.2), 0.7, 0.7 + 0.42 / (sqrt(0.18625) + 0.1)),
        (0.8, FedYogi(**HALF, eta=0.8), 0.4, 0.4 + 0.16 / (sqrt(0.07) + 0.1)),
        (0.6, FedAvgM(alpha=0.5, eta=0.5, beta1=0.5), 0.15, 0.3375),
    ],
    ids=["adagrad", "adagrad-momentum", "adam", "yogi", "avgm"],
)
def test_two_rounds(B: float, algorithm: Algorithm, one: float, two: float) -> None:
    assert by_hand(B, algorithm, 1).x.item() == pytest.approx(one, abs=1e-13)
    assert by_hand(B, algorithm, 2).x.item() == pytest.approx(two, abs=1e-13)


@pytest.mark.parametrize(
    "algorithm", [FedAdaGrad(alpha=0.5), FedAdam(alpha=0.5), FedYogi(alpha=0.5), FedAvgM(alpha=0.5)]
)
def test_trace(algorithm: Algorithm) -> None:
    """The reported gradient of round 1 is that of f at 0, of length B; one number goes down and one
    up."""
    trace = by_hand(0.6, algorithm, 1).trace
    assert trace["grad_norm"][1] == pytest.approx(0.6, rel=1e-14)
    assert trace["bytes_up"][1] == trace["bytes_down"][1] == 2 * 8


def test_first_step_of_fedadagrad(quad: Federation) -> None:
    """eta delta / (sqrt(eps^2 + delta^2) + eps)."""
    delta = run(quad, FedAvg(alpha=0.3), 1)
    x = run(quad, FedAdaGrad(alpha=0.3, eta=0.7, beta1=0.0, eps=0.02), 1)
    torch.testing.assert_close(
        x, 0.7 * delta / ((0.02**2 + delta**2).sqrt() + 0.02), rtol=0, atol=1e-10
    )


def test_fedadam_without_memory_steps_by_the_sign(quad: Federation) -> None:
    delta = run(quad, FedAvg(alpha=0.3), 1)
    x = run(quad, FedAdam(alpha=0.3, eta=0.7, beta1=0.0, beta2=0.0, eps=1e-13), 1)
    torch.testing.assert_close(x, 0.7 * delta.sign(), rtol=0, atol=1e-10)


def test_fedavgm_without_momentum_is_fedavg(quad: Federation) -> None:
    expected = run(quad, FedAvg(alpha=0.3), 7)
    torch.testing.assert_close(
        run(quad, FedAvgM(alpha=0.3, beta1=0.0, eta=1.0), 7), expected, rtol=0, atol=1e-10
    )


def test_fedavgm_has_the_limit_of_fedavg(quad: Federation) -> None:
    expected = run(quad, FedAvg(alpha=1.0), 40)
    torch.testing.assert_close(
        run(quad, FedAvgM(alpha=1.0, beta1=0.5, eta=0.5), 80), expected, rtol=0, atol=1e-10
    )


def test_fedadagrad_with_a_large_eps_is_fedavg_with_a_server_step(quad: Federation) -> None:
    expected = run(quad, FedAvg(alpha=0.3, eta=0.8), 7)
    x = run(quad, FedAdaGrad(alpha=0.3, eta=1.6e7, beta1=0.0, eps=1e7), 7)
    torch.testing.assert_close(x, expected, rtol=0, atol=1e-10)


def test_fedyogi_and_fedadam_agree_while_delta_squared_exceeds_v(quad: Federation) -> None:
    """From v = 0 Adam's v is (1 - beta2) delta^2, and so is Yogi's."""
    make: dict[str, Any] = {"alpha": 0.3, "eta": 0.7, "eps": 1e-13}
    torch.testing.assert_close(
        run(quad, FedYogi(**make), 1), run(quad, FedAdam(**make), 1), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (FedAdam, {"eps": 0}, "eps must be > 0"),
        (FedAdam, {"beta2": 1.0}, r"beta2 must be in \[0, 1\)"),
        (FedYogi, {"beta2": -0.1}, r"beta2 must be in \[0, 1\)"),
        (FedAdaGrad, {"beta1": 1.0}, r"beta1 must be in \[0, 1\)"),
        (FedAvgM, {"beta1": 1.5}, r"beta1 must be in \[0, 1\)"),
        (FedYogi, {"eta": 0}, "eta must be > 0"),
        (FedAvgM, {"alpha": -1}, "alpha must be > 0"),
    ],
)
def test_wrong_values_are_refused(
    kind: type[Algorithm], values: dict[str, float], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        kind(**values)
