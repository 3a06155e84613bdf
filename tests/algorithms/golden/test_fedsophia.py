"""Fed-Sophia by hand.

Two clients with one row each, logistic loss log(1 + e^z) - y z of z = a^T x:

    a_1 = (1, 2), y_1 = 1, p_1 = 1/4        a_2 = (4, 1), y_2 = 0, p_2 = 3/4

beta1 = beta2 = 1/2, rho = 1.75, alpha = 0.1, tau = 1, x_1 = (0, 0). There the model gives both
labels the probability 1/2: whichever it draws, g_hat = +-a/2 and h_hat = a^2/4.

Round 1   client 1: g = -a/2,  m = (-0.25, -0.5),  v = a^2/8 = (0.125, 0.5),
                               m/v = (-2, -1), clipped (-1.75, -1)
          client 2: g = a/2,   m = (1, 0.25),      v = (2, 0.125),
                               m/v = (0.5, 2), clipped (0.5, 1.75)
          updates (0.175, 0.1) and (-0.05, -0.175); their mean is (0.00625, -0.10625)
Round 2   v stays (T = 10), m becomes the mean of the old one and (sigma(z) - y) a.

Weight decay 0.5 takes another 0.05 x from the model in round 2.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedsso import Federation, InputError, simulate
from fedsso.algorithms import FedSophia
from fedsso.data import quadratic
from fedsso.engine.simulate import run
from fedsso.experiment.stepper import Simulation

F64: dict[str, Any] = {"dtype": "float64", "device": "cpu"}
EXACT: dict[str, Any] = {**F64, "batch_size": None}
ROWS = torch.tensor([[1.0, 2.0], [4.0, 1.0]], dtype=torch.float64)
LABELS = torch.tensor([1.0, 0.0], dtype=torch.float64)
P = torch.tensor([0.25, 0.75], dtype=torch.float64)
HAND: dict[str, Any] = {"alpha": 0.1, "beta1": 0.5, "beta2": 0.5, "rho": 1.75}


def fly(rounds: int, **extra: Any) -> Tensor:
    pairs = [(row[None], label[None]) for row, label in zip(ROWS, LABELS, strict=True)]
    fed = Federation.from_clients(pairs, test_fraction=0, weights=P)
    options: dict[str, Any] = {**EXACT, "loss": "bce", "local_steps": 1}
    x: Tensor = simulate(fed, "linear", FedSophia(**HAND, **extra), rounds=rounds, **options).x
    return x


def second(x: Tensor) -> Tensor:
    """The mean of the clients' directions in round 2."""
    g = (torch.sigmoid(ROWS @ x) - LABELS)[:, None] * ROWS
    m = (torch.tensor([[-0.25, -0.5], [1.0, 0.25]]).double() + g) / 2
    return P @ (m / (ROWS**2 / 8)).clamp(-1.75, 1.75)


def test_two_rounds() -> None:
    first = fly(1)
    assert first.tolist() == pytest.approx([0.00625, -0.10625], abs=1e-14)
    torch.testing.assert_close(fly(2), first - 0.1 * second(first), rtol=0, atol=1e-15)


def test_weight_decay() -> None:
    first = fly(1, weight_decay=0.5)
    torch.testing.assert_close(first, fly(1), rtol=0, atol=0)
    expected = 0.95 * first - 0.1 * second(first)
    torch.testing.assert_close(fly(2, weight_decay=0.5), expected, rtol=0, atol=1e-15)


def simulation(
    fed: Federation, algorithm: FedSophia, model: str = "linear", **options: Any
) -> Simulation:
    full = {**EXACT, **options}
    return Simulation(fed, model, [algorithm], **full)


def after(sim: Simulation, k: int) -> list[Any]:
    """What every client keeps after round k."""
    run(sim, k)
    return list(sim.own)


def test_a_tight_bound_makes_it_sign_descent(quad: Federation) -> None:
    """Every entry of m / v exceeds rho, so that each local step is alpha rho = 0.01 long in every
    coordinate."""
    A, b = matrices(quad)
    expected = torch.zeros(6, dtype=torch.float64)
    for _ in range(4):
        y = expected.expand(4, 6)
        for _ in range(3):
            y = y - 0.01 * ((A @ (y - b)[..., None])[..., 0]).sign()
        expected = quad.p @ y
    algorithm = FedSophia(alpha=1e7, beta1=0.0, rho=1e-9)
    x = simulate(quad, "linear", algorithm, rounds=4, local_steps=3, **EXACT).x
    torch.testing.assert_close(x, expected, rtol=0, atol=1e-10)


def matrices(fed: Federation) -> tuple[Tensor, Tensor]:
    """A_i and b_i of the quadratics 1/2 (x - b)^T A (x - b), from their rows."""
    rows = [fed.rows_of(i) for i in range(fed.clients)]
    a = torch.stack([fed.x[r] for r in rows]).double()
    A = 2 * a.mT @ a / a.shape[-1]
    b = torch.linalg.solve(a, torch.stack([fed.y[r] for r in rows]).double()[..., None])
    return A, b[..., 0]


def test_the_estimate_is_the_diagonal_of_the_hessian_in_the_mean() -> None:
    """Clients with the same rows draw targets of their own; their v with beta2 = 0 is one estimate
    each."""
    A = torch.tensor([[2.0, 0.5, 0.1], [0.5, 1.0, 0.2], [0.1, 0.2, 0.5]], dtype=torch.float64)
    n = 1500
    fed = quadratic(A.expand(n, 3, 3), torch.ones(n, 3))
    v = torch.stack(
        [own.v[0] for own in after(simulation(fed, FedSophia(beta2=0.0), local_steps=1), 1)]
    )
    error = v.std(0) / n**0.5
    assert (v.std(0) > 0.5 * A.diagonal()).all()
    assert ((v.mean(0) - A.diagonal()).abs() < 4 * error).all()


def test_the_curvature_is_refreshed_every_T_local_steps(quad: Federation) -> None:
    """tau = 2, T = 3: steps 0, 3 and 6 of a run lie in rounds 1, 2 and 4."""
    sim = simulation(quad, FedSophia(T=3), local_steps=2)
    v = [torch.stack([own.v for own in after(sim, k)]) for k in range(6)]
    assert [not torch.equal(v[k - 1], v[k]) for k in range(1, 6)] == [True, True, False, True, True]


def test_every_client_counts_its_own_steps(fed: Federation) -> None:
    harsh: dict[str, Any] = {
        "participation": 0.6,
        "stragglers": 0.5,
        "local_steps": 4,
        "batch_size": 4,
        "seed": 2,
    }
    sim = simulation(fed, FedSophia(), "mclr", **harsh)
    own = after(sim, 1)
    assert [float(memory.t) for memory in own] == sim.position.tolist()
    assert 0 in sim.position  # who was not chosen keeps nothing
    assert all(bool(memory.m.any()) == bool(memory.v.any()) == (memory.t > 0) for memory in own)
    run(sim, 5)
    assert [float(memory.t) for memory in sim.own] == sim.position.tolist()


def test_only_models_travel(quad: Federation) -> None:
    trace = simulate(quad, "linear", FedSophia(), rounds=1, **EXACT).trace
    assert trace["bytes_up"][1] == trace["bytes_down"][1] == 4 * 6 * 8


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rho": 0}, "rho.*> 0 and finite.*rho=0"),
        ({"eps": 0}, "eps.*> 0 and finite.*eps=0"),
        ({"beta1": 1}, r"beta1 must be in \[0, 1\), got beta1=1"),
        ({"beta2": -0.1}, r"beta2 must be in \[0, 1\), got beta2=-0.1"),
        ({"weight_decay": -1}, "weight_decay.*>= 0 and finite.*weight_decay=-1"),
        ({"T": 0}, "T.*integer >= 1.*T=0"),
        ({"alpha": -1}, "alpha.*> 0 and finite.*alpha=-1"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FedSophia(**values)
