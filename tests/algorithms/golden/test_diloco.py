"""DiLoCo by hand.

f(x) = 1/2 (x - 1)^2 of one client, alpha = 1/2, one local step: delta = (1 - x) / 2. beta = 1/2,
eta = 1, from 0.

Round 1   g = -0.5       m = -0.5                    x = 0.5 + 0.25 = 0.75
Round 2   g = -0.125     m = -0.25 - 0.125 = -0.375  x = 0.75 + 0.125 + 0.1875 = 1.0625
Round 3   g = 0.03125    m = -0.1875 + 0.03125 = -0.15625
                         x = 1.0625 - 0.03125 + 0.078125 = 1.109375
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from quadratics import close, go
from torch import Tensor

from fedsso import DiLoCo, FedAvg, Federation, simulate
from fedsso.data import quadratic
from fedsso.errors import InputError


@pytest.mark.parametrize(("rounds", "x"), [(1, 0.75), (2, 1.0625), (3, 1.109375)])
def test_three_rounds(rounds: int, x: float) -> None:
    fed = quadratic([[[1.0]]], [[1.0]])
    found = go(fed, DiLoCo(alpha=0.5, beta=0.5, eta=1), rounds, local_steps=1)
    assert found.x.item() == pytest.approx(x, abs=1e-14)
    assert found.trace["bytes_up"][1] == found.trace["bytes_down"][1] == 8


def test_it_is_nesterovs_sgd_of_torch(quad: Federation) -> None:
    """With one local step the outer gradient is alpha times the gradient of f."""
    x = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    outer = torch.optim.SGD([x], lr=0.4, momentum=0.8, nesterov=True)
    for _ in range(9):
        x.grad = 0.5 * gradient(quad, x.detach())
        outer.step()
    close(go(quad, DiLoCo(alpha=0.5, beta=0.8, eta=0.4), 9, local_steps=1).x, x.detach(), 1e-13)


def gradient(fed: Federation, x: Tensor) -> Tensor:
    """Of f = sum p_i f_i, where f_i is the mean square of a client's d residuals."""
    total = torch.zeros_like(x)
    for i, weight in enumerate(fed.p):
        rows: Sequence[int] = fed.rows_of(i)
        a, t = fed.x[rows], fed.y[rows]
        total += weight * 2 / len(t) * a.mT @ (a @ x - t)
    return total


@pytest.mark.parametrize("eta", [1.0, 0.6])
def test_without_momentum_it_is_fedavg(quad: Federation, eta: float) -> None:
    expected = go(quad, FedAvg(alpha=0.3, eta=eta), 7).x
    close(go(quad, DiLoCo(alpha=0.3, beta=0, eta=eta), 7).x, expected, 1e-14)


def test_it_has_the_limit_of_fedavg(quad: Federation) -> None:
    """Both have the fixed point delta = 0.

    An update is S (b - x) with S = A (1 - A / 4), and A has eigenvalues from 1/8 to 1: the least of
    S is 0.121. A round of FedAvg shrinks the distance by 0.879 or more. For DiLoCo it is the larger
    root of z^2 - (1.5 - 0.75 s) z + 0.5 - 0.25 s, which at s = 0.121 is 0.87; 0.88^300 < 1e-16.
    """
    expected = go(quad, FedAvg(alpha=0.5), 300).x
    close(go(quad, DiLoCo(alpha=0.5, beta=0.5, eta=0.5), 300).x, expected, 1e-12)


def test_clients_may_step_by_adamw(fed: Federation) -> None:
    """As in the paper, whose inner optimiser it is."""
    run = simulate(fed, "mclr", DiLoCo(alpha=0.01), rounds=5, client="adamw", device="cpu")
    assert run.diverged is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"beta": 1.0}, r"beta must be in \[0, 1\)"),
        ({"eta": 0}, "eta must be > 0"),
        ({"alpha": -1}, "alpha must be > 0"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        DiLoCo(**values)
