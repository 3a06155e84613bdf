"""Lion at the server by hand.

f(x) = 1/2 (x - 1)^2 of one client, alpha = 1/2, one local step: delta = (1 - x) / 2. beta1 = 1/4,
beta2 = 1/2, eta = 2, from 0.

Round 1   delta = 0.5     c = 0.375                          x = 2    m = 0.25
Round 2   delta = -0.5    c = 0.0625 - 0.375 = -0.3125       x = 0    m = 0.125 - 0.25 = -0.125
Round 3   delta = 0.5     c = -0.03125 + 0.375               x = 2    m = -0.0625 + 0.25 = 0.1875

With beta1 = 3/4 the momentum decides round 2:

Round 1   delta = 0.5     c = 0.125                          x = 2    m = 0.25
Round 2   delta = -0.5    c = 0.1875 - 0.125 = 0.0625        x = 4    m = -0.125
Round 3   delta = -1.5    c = -0.09375 - 0.375 = -0.46875    x = 2    m = -0.0625 - 0.75 = -0.8125
"""

from __future__ import annotations

import pytest
import torch
from quadratics import OPTIONS, close, go, pair

from fedsso import FedAvg, Federation, ServerLion
from fedsso.algorithm import Cohort
from fedsso.data import quadratic
from fedsso.engine.simulate import run
from fedsso.errors import InputError
from fedsso.experiment.stepper import Simulation

HAND = {
    0.25: ([2.0, 0.0, 2.0], [0.25, -0.125, 0.1875]),
    0.75: ([2.0, 4.0, 2.0], [0.25, -0.125, -0.8125]),
}


@pytest.mark.parametrize("beta1", HAND)
def test_three_rounds(beta1: float) -> None:
    fed = quadratic([[[1.0]]], [[1.0]])
    record = ServerLion(alpha=0.5, eta=2, beta1=beta1, beta2=0.5)
    sim = Simulation(fed, "linear", [record], rounds=3, **{**OPTIONS, "local_steps": 1})
    for x, m in zip(*HAND[beta1], strict=True):
        sim.round()
        assert sim.server.x.item() == pytest.approx(x, abs=1e-14)
        assert sim.server.m.item() == pytest.approx(m, abs=1e-14)
    assert sim.rows[1]["bytes_up"] == sim.rows[1]["bytes_down"] == 8


def test_without_memory_it_steps_by_the_sign_of_fedavgs_update(quad: Federation) -> None:
    delta = go(quad, FedAvg(alpha=0.3), 1).x
    close(go(quad, ServerLion(alpha=0.3, eta=0.7, beta1=0), 1).x, 0.7 * delta.sign(), 1e-15)


def test_the_length_of_updates_does_not_count() -> None:
    """With one local step and f scaled by 16, updates are 16 times as long, to the bit."""
    A, b = [[[1.0, 0], [0, 2.0]]], [[1.0, 3.0]]
    large = [[[16 * v for v in row] for row in matrix] for matrix in A]
    x, y = (
        go(quadratic(M, b), ServerLion(alpha=0.1, eta=0.125), 20, local_steps=1).x
        for M in (A, large)
    )
    assert torch.equal(x, y)


def test_what_has_no_update_stays() -> None:
    """The second parameter has its minimum where it starts."""
    fed = quadratic([[[1.0, 0], [0, 2.0]]], [[1.0, 0.0]])
    assert go(fed, ServerLion(alpha=0.1, eta=0.5), 1).x.tolist() == [0.5, 0.0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_sign_hides_no_divergence(bad: float) -> None:
    """The sign of NaN would be 0, that of infinity 1."""
    record = ServerLion()
    cohort = Cohort(1, 2, torch.arange(2), 1.0, 1.0)
    delta = torch.tensor([[1.0, bad, -1.0]])
    x = record.server(record.server_init(torch.zeros(1, 3)), delta, cohort).x
    assert x.isnan().tolist() == [[False, True, False]]


def test_it_ends_within_some_steps_of_the_minimum() -> None:
    """Each entry moves by eta in every round, so the distance is of the order of eta: with beta1 =
    beta2 = 0 it is at most eta, once the sign has changed."""
    fed = pair()
    sim = Simulation(
        fed, "linear", [ServerLion(alpha=0.1, eta=0.01, beta1=0, beta2=0)], rounds=300, **OPTIONS
    )
    run(sim, 300)
    limit = go(fed, FedAvg(alpha=0.1), 400).x
    assert float((sim.server.x[0] - limit).abs().max()) <= 0.01 * (1 + 1e-9)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"beta1": 1.0}, r"beta1 must be in \[0, 1\)"),
        ({"beta2": -0.1}, r"beta2 must be in \[0, 1\)"),
        ({"eta": 0}, "eta must be > 0"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ServerLion(**values)
