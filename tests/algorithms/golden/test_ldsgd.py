"""LD-SGD by hand.

Two clients, two parameters, f_i(x) = 1/2 (x - b_i)^T A_i (x - b_i):

    A_1 = diag(1, 2), b_1 = (1, 0), p_1 = 1/4        A_2 = diag(3, 1), b_2 = (0, 2), p_2 = 3/4

alpha = 0.1, tau = 2, I2 = 2, x_1 = (0, 0). Two steps multiply the distance to b_i by diag(0.81,
0.64) at client 1 and diag(0.49, 0.81) at client 2.

Exchange 1   (0.19, 0) and (0, 0.38), mean (0.0475, 0.285)
Exchange 2   gradients (-0.9525, 0.57) and (0.1425, -1.715), mean (-0.13125, -1.14375)
             x = (0.0475 + 0.013125, 0.285 + 0.114375) = (0.060625, 0.399375)
             losses 0.9525^2/2 + 0.285^2 and 3 * 0.0475^2/2 + 1.715^2/2
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsso import FedAvg, Federation, FedSGD, Run, simulate
from fedsso.algorithm import Algorithm
from fedsso.algorithms.first_order.ldsgd import LDSGD
from fedsso.data import quadratic
from fedsso.errors import InputError

OPTIONS: dict[str, Any] = {
    "batch_size": None,
    "dtype": "float64",
    "device": "cpu",
    "eval_every": 1000,
}


def by_hand() -> Run:
    fed = quadratic([[[1, 0], [0, 2]], [[3, 0], [0, 1]]], [[1, 0], [0, 2]], [0.25, 0.75])
    result: Run = simulate(
        fed, "linear", LDSGD(alpha=0.1, I2=2), rounds=1, local_steps=2, **OPTIONS
    )
    return result


def run(fed: Federation, algorithm: Algorithm, rounds: int, **options: Any) -> Run:
    result: Run = simulate(fed, "linear", algorithm, rounds=rounds, **{**OPTIONS, **options})
    return result


def parts(fed: Federation) -> tuple[Tensor, Tensor, Tensor]:
    """A [N, d, d], b [N, d, 1] and p [N, 1, 1] of a federation of quadratics."""
    rows = [fed.rows_of(i) for i in range(fed.clients)]
    a, t = torch.stack([fed.x[r] for r in rows]), torch.stack([fed.y[r] for r in rows])
    return 2 / a.shape[-1] * a.mT @ a, torch.linalg.solve(a, t[..., None]), fed.p[:, None, None]


def test_one_round() -> None:
    assert by_hand().x.tolist() == pytest.approx([0.060625, 0.399375], abs=1e-14)


def test_trace() -> None:
    """The gradient and the loss are those of the last exchange; every exchange costs a model each
    way."""
    trace = by_hand().trace
    assert trace["grad_norm"][1] == pytest.approx(math.hypot(0.13125, 1.14375), rel=1e-14)
    loss = (0.9525**2 / 2 + 0.285**2) / 4 + 0.75 * (1.5 * 0.0475**2 + 1.715**2 / 2)
    assert trace["train_loss"][1] == pytest.approx(loss, rel=1e-14)
    assert trace["bytes_up"][1] == trace["bytes_down"][1] == 2 * (2 * 2 * 8)


@pytest.mark.parametrize("batch_size", [None, 2])
def test_one_average_is_fedavg(quad: Federation, batch_size: int | None) -> None:
    options: dict[str, Any] = {"local_steps": 4, "batch_size": batch_size, "stragglers": 0.5}
    a, b = (run(quad, kind, 6, **options) for kind in (LDSGD(alpha=0.3, I2=1), FedAvg(alpha=0.3)))
    assert torch.equal(a.x, b.x)
    for column in ("train_loss", "grad_norm", "bytes_up", "bytes_down"):
        np.testing.assert_array_equal(a.trace[column], b.trace[column], err_msg=column)


def test_local_steps_then_averaged_ones(quad: Federation) -> None:
    """FedAvg's closed form x = sum p_i (b_i + (I - alpha A_i)^tau (x - b_i)), and twice with tau =
    1."""
    A, b, p = parts(quad)
    x = torch.zeros(6, 1, dtype=torch.float64)
    for tau in (4, 1, 1) * 3:
        x = (p * (b + torch.linalg.matrix_power(torch.eye(6) - 0.3 * A, tau) @ (x - b))).sum(0)
    result = run(quad, LDSGD(alpha=0.3, I2=3), 3, local_steps=4).x
    torch.testing.assert_close(result, x[:, 0], rtol=0, atol=1e-10)


def test_no_local_steps_are_rounds_of_fedsgd(quad: Federation) -> None:
    expected = run(quad, FedSGD(alpha=0.3), 12).x
    torch.testing.assert_close(
        run(quad, LDSGD(alpha=0.3, I2=4), 3, local_steps=1).x, expected, rtol=0, atol=1e-10
    )


def test_averaged_steps_go_on_in_the_stream_of_mini_batches(quad: Federation) -> None:
    """With one client a round of tau = 3 and I2 = 3 is one of FedAvg with five steps, on the same
    batches."""
    A, b, _ = parts(quad)
    alone = quadratic(A[:1], b[:1, :, 0])
    expected = run(alone, FedAvg(alpha=0.1), 4, batch_size=2, local_steps=5).x
    x = run(alone, LDSGD(alpha=0.1, I2=3), 4, batch_size=2, local_steps=3).x
    torch.testing.assert_close(x, expected, rtol=0, atol=1e-10)


def test_averaged_steps_lessen_the_drift(quad: Federation) -> None:
    assert quad.optimum is not None
    error = [
        float((run(quad, LDSGD(alpha=0.5, I2=n), 12, local_steps=4).x - quad.optimum).norm())
        for n in (1, 3, 9)
    ]
    assert error[2] < error[1] < error[0]


@pytest.mark.parametrize("values", [{"I2": 0}, {"alpha": 0}])
def test_wrong_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="must be"):
        LDSGD(**values)
