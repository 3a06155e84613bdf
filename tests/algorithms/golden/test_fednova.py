"""FedNova by hand.

Two clients, one parameter, f_i(x) = A_i/2 (x - b_i)^2 with A_1 = 1, b_1 = 1, p_1 = 1/4 and A_2 = 2,
b_2 = 2, p_2 = 3/4. One pass in batches of one row: client 1 has one row and takes tau_1 = 1 step,
client 2 has it twice: tau_2 = 2. alpha = 0.1, x_1 = 0, tau_eff = 1/4 + 3/4 * 2 = 7/4. A step
multiplies the distance to b_i by 1 - 0.1 A_i.

Round 1   client 1: y = 0.1                    d = -1                 loss 1/2
          client 2: y = 2 - 0.64 * 2 = 0.72    d = -0.72/0.2 = -3.6
                                               losses 4 and 1.6^2 = 2.56, mean 3.28
          mean d = -0.25 - 2.7 = -2.95         x = 0.175 * 2.95 = 0.51625      (FedAvg: 0.565)
Round 2   client 1: d = 0.51625 - 1 = -0.48375
          client 2: y - x = 0.36 * 1.48375 = 0.53415, d = -2.67075
          mean d = -0.1209375 - 2.0030625 = -2.124      x = 0.51625 + 0.175 * 2.124 = 0.88795
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedsso import FedAvg, Federation, FedSGD, Run, simulate
from fedsso.algorithm import Algorithm
from fedsso.algorithms.first_order.fednova import FedNova
from fedsso.engine.rounds import Rounds
from fedsso.engine.settings import Settings
from fedsso.errors import InputError

OPTIONS: dict[str, Any] = {
    "batch_size": None,
    "dtype": "float64",
    "device": "cpu",
    "eval_every": 1000,
}
LATE: dict[str, Any] = {"local_steps": 6, "stragglers": 1.0, "seed": 3}


def by_hand(rounds: int, algorithm: Algorithm) -> Run:
    def client(A: float, b: float, n: int) -> tuple[Tensor, Tensor]:
        a = torch.full((n, 1), (A / 2) ** 0.5, dtype=torch.float64)
        return a, b * a[:, 0]

    fed = Federation.from_clients(
        [client(1, 1, 1), client(2, 2, 2)], test_fraction=0, weights=[0.25, 0.75]
    )
    options: dict[str, Any] = {**OPTIONS, "batch_size": 1, "local_steps": None, "local_epochs": 1}
    result: Run = simulate(fed, "linear", algorithm, rounds=rounds, **options)
    return result


def run(fed: Federation, algorithm: Algorithm, rounds: int, **options: Any) -> Tensor:
    x: Tensor = simulate(fed, "linear", algorithm, rounds=rounds, **{**OPTIONS, **options}).x
    return x


def parts(fed: Federation) -> tuple[Tensor, Tensor]:
    """A [N, d, d] and b [N, d, 1] of a federation of quadratics."""
    rows = [fed.rows_of(i) for i in range(fed.clients)]
    a, t = torch.stack([fed.x[r] for r in rows]), torch.stack([fed.y[r] for r in rows])
    return 2 / a.shape[-1] * a.mT @ a, torch.linalg.solve(a, t[..., None])


def test_two_rounds() -> None:
    assert by_hand(1, FedNova(alpha=0.1)).x.item() == pytest.approx(0.51625, abs=1e-14)
    assert by_hand(2, FedNova(alpha=0.1)).x.item() == pytest.approx(0.88795, abs=1e-14)
    assert by_hand(1, FedAvg(alpha=0.1)).x.item() == pytest.approx(0.565, abs=1e-14)


def test_trace() -> None:
    trace = by_hand(1, FedNova(alpha=0.1)).trace
    assert trace["train_loss"][1] == pytest.approx(0.125 + 0.75 * 3.28, rel=1e-14)
    assert trace["grad_norm"][1] == pytest.approx(2.95, rel=1e-14)
    assert trace["bytes_down"][1] == 2 * 8
    assert trace["bytes_up"][1] == 2 * 2 * 8  # d and tau_i


@pytest.mark.parametrize("tau", [1, 4])
def test_equal_steps_are_fedavg(quad: Federation, tau: int) -> None:
    expected = run(quad, FedAvg(alpha=0.3), 6, local_steps=tau)
    torch.testing.assert_close(
        run(quad, FedNova(alpha=0.3), 6, local_steps=tau), expected, rtol=0, atol=1e-10
    )


def test_one_step_is_fedsgd(quad: Federation) -> None:
    expected = run(quad, FedSGD(alpha=0.3), 6, local_steps=1)
    torch.testing.assert_close(
        run(quad, FedNova(alpha=0.3), 6, local_steps=1), expected, rtol=0, atol=1e-10
    )


def test_unequal_steps(quad: Federation) -> None:
    """x - tau_eff alpha sum p_i (x - y_i) / (alpha tau_i), y_i = b_i + (I - alpha A_i)^tau_i (x -
    b_i)."""
    A, b = parts(quad)
    alpha, x = 0.3, torch.zeros(6, 1, dtype=torch.float64)
    plans = Rounds(quad, Settings(batch_size=None, **LATE))
    for k in (1, 2, 3):
        tau = plans.plan(k).steps
        assert len(set(tau.tolist())) > 1
        S = [
            torch.linalg.matrix_power(torch.eye(6) - alpha * A[i], int(n))
            for i, n in enumerate(tau)
        ]
        y = torch.stack([b[i] + S[i] @ (x - b[i]) for i in range(4)])
        x = x - (quad.p * tau).sum() * ((quad.p / tau)[:, None, None] * (x - y)).sum(0)
    torch.testing.assert_close(
        run(quad, FedNova(alpha=alpha), 3, **LATE), x[:, 0], rtol=0, atol=1e-10
    )


def test_small_steps_follow_the_gradient_of_f_whatever_the_clients_steps(quad: Federation) -> None:
    """The objective is consistent: -x / (alpha tau_eff) of round 1 is grad f(0) + O(alpha).
    FedAvg's is not."""
    A, b = parts(quad)
    g = (quad.p[:, None, None] * A @ -b).sum(0)[:, 0]
    tau = Rounds(quad, Settings(batch_size=None, **LATE)).plan(1).steps
    work = -1e-6 * float((quad.p * tau).sum())
    error, other = (
        (run(quad, kind(alpha=1e-6), 1, **LATE) / work - g).norm() / g.norm()
        for kind in (FedNova, FedAvg)
    )
    assert error < 1e-5
    assert other > 0.1


def test_wrong_values_are_refused() -> None:
    with pytest.raises(InputError, match="alpha must be > 0"):
        FedNova(alpha=0)
