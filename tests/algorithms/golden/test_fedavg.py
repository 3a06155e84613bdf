"""FedAvg by hand.

Two clients, two parameters, f_i(x) = 1/2 (x - b_i)^T A_i (x - b_i):

    A_1 = diag(1, 2), b_1 = (1, 0), p_1 = 1/4        A_2 = diag(3, 1), b_2 = (0, 2), p_2 = 3/4

alpha = 0.1, tau = 2, x_1 = (0, 0). One local step multiplies the distance to b_i by I - 0.1 A_i, so
two steps multiply it by diag(0.81, 0.64) at client 1 and diag(0.49, 0.81) at client 2.

Round 1   client 1: (1 - 0.81, 0) = (0.19, 0)          losses 1/2 and 0.9^2/2 = 0.405, mean 0.4525
          client 2: (0, 2 - 1.62) = (0, 0.38)          losses 2 and 1.8^2/2 = 1.62, mean 1.81
          mean (0.19/4, 3 * 0.38/4) = (0.0475, 0.285)  loss 0.4525/4 + 3 * 1.81/4 = 1.470625
Round 2   client 1: (1 - 0.81 * 0.9525, 0.64 * 0.285) = (0.228475, 0.1824)
          client 2: (0.49 * 0.0475, 2 - 0.81 * 1.715) = (0.023275, 0.61085)
          mean (0.05711875 + 0.01745625, 0.0456 + 0.4581375) = (0.074575, 0.5037375)

A server step eta = 1/2 halves the first update: (0.02375, 0.1425).
The reported gradient of round 1 has the length |(0.0475, 0.285)| / (alpha tau) = |(0.2375, 1.425)|.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from fedsso import FedAvg, Run, simulate
from fedsso.data import quadratic


def run(rounds: int, eta: float = 1.0) -> Run:
    fed = quadratic([[[1, 0], [0, 2]], [[3, 0], [0, 1]]], [[1, 0], [0, 2]], [0.25, 0.75])
    options: dict[str, Any] = {
        "local_steps": 2,
        "batch_size": None,
        "dtype": "float64",
        "device": "cpu",
    }
    result: Run = simulate(fed, "linear", FedAvg(alpha=0.1, eta=eta), rounds=rounds, **options)
    return result


def test_two_rounds() -> None:
    assert run(1).x.tolist() == pytest.approx([0.0475, 0.285], abs=1e-14)
    assert run(2).x.tolist() == pytest.approx([0.074575, 0.5037375], abs=1e-14)


def test_server_step() -> None:
    assert run(1, eta=0.5).x.tolist() == pytest.approx([0.02375, 0.1425], abs=1e-14)


def test_trace() -> None:
    trace = run(1).trace
    assert trace["train_loss"][1] == pytest.approx(1.470625, rel=1e-14)
    assert trace["grad_norm"][1] == pytest.approx(math.hypot(0.2375, 1.425), rel=1e-14)
    assert trace["bytes_up"][1] == trace["bytes_down"][1] == 2 * 2 * 8
