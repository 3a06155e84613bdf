"""FedSGD by hand.

Two clients, two parameters, f_i(x) = 1/2 (x - b_i)^T A_i (x - b_i):

    A_1 = diag(1, 2), b_1 = (1, 0), p_1 = 1/4        A_2 = diag(3, 1), b_2 = (0, 2), p_2 = 3/4

alpha = 0.1, x_1 = (0, 0); whatever tau is asked for, each client sends one gradient A_i (x - b_i).

Round 1   client 1: (-1, 0)            client 2: (0, -2)
          g = (-0.25, -1.5)            x_2 = (0.025, 0.15)       loss 0.5/4 + 3 * 2/4 = 1.625
Round 2   client 1: (-0.975, 0.3)      client 2: (0.075, -1.85)
          g = (-0.24375 + 0.05625, 0.075 - 1.3875) = (-0.1875, -1.3125)
          x_3 = (0.025 + 0.01875, 0.15 + 0.13125) = (0.04375, 0.28125)
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from fedsso import FedSGD, Run, simulate
from fedsso.data import quadratic


def run(rounds: int, tau: int = 7) -> Run:
    fed = quadratic([[[1, 0], [0, 2]], [[3, 0], [0, 1]]], [[1, 0], [0, 2]], [0.25, 0.75])
    options: dict[str, Any] = {
        "local_steps": tau,
        "batch_size": None,
        "dtype": "float64",
        "device": "cpu",
    }
    result: Run = simulate(fed, "linear", FedSGD(alpha=0.1), rounds=rounds, **options)
    return result


@pytest.mark.parametrize("tau", [1, 7])
def test_two_rounds(tau: int) -> None:
    assert run(1, tau).x.tolist() == pytest.approx([0.025, 0.15], abs=1e-14)
    assert run(2, tau).x.tolist() == pytest.approx([0.04375, 0.28125], abs=1e-14)


def test_trace() -> None:
    trace = run(2).trace
    assert trace["train_loss"][1] == pytest.approx(1.625, rel=1e-14)
    assert trace["grad_norm"][1:].tolist() == pytest.approx(
        [math.hypot(0.25, 1.5), math.hypot(0.1875, 1.3125)]
    )
    assert trace["bytes_up"][1] == trace["bytes_down"][1] == 2 * 2 * 8
