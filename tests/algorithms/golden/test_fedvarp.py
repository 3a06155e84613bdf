"""FedVARP by hand.

The three quadratics of `trio`, alpha = 0.1, tau = 2, p = (0.5, 0.3, 0.2), from (4, -3). An update
is Delta_i = S_i (b_i - x) with S_1 = diag(0.19, 0.64), S_2 = diag(0.36, 0.19) and S_3 = [[0.5,
0.15], [0.15, 0.35]] (see test_fedexp.py).

Round 1   clients 1 and 2, m = 0.8, w = (5/8, 3/8)
          Delta = (-0.57, 1.92), (-1.8, 0.95)
          v = (-0.35625 - 0.675, 1.2 + 0.35625) = (-1.03125, 1.55625)
          x = (2.96875, -1.44375), y = 0.8 v = (-0.825, 1.245)
Round 2   clients 2 and 3, m = 0.5, w = (3/5, 2/5)
          Delta_2 = S_2 (-3.96875, 3.44375) = (-1.42875, 0.6543125)
          Delta_3 = S_3 (-2.96875, 2.44375) = (-1.1178125, 0.41)
          change = 0.6 (0.37125, -0.2956875) + 0.4 (-1.1178125, 0.41) = (-0.224375, -0.0134125)
          v = (-1.049375, 1.2315875), x = (1.919375, -0.2121625)

and so on, with clients 1 and 3, then 1 and 2.
"""

from __future__ import annotations

import pytest
import torch
from quadratics import OPTIONS, START, close, fix_cohorts, go, trio

from fedsso import FedAvg, Federation, FedVARP
from fedsso.engine.simulate import run
from fedsso.errors import InputError
from fedsso.experiment.stepper import Simulation

COHORTS = ([0, 1], [1, 2], [0, 2])
ITERATES = (
    (2.96875, -1.44375),
    (1.919375, -0.2121625),
    (1.3616864285714283, -0.3264942857142856),
    (0.9733272785714282, -0.0689101660714285),
)
ONE_OF_THREE = {"participation": 1 / 3}


@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
def test_four_rounds_with_two_of_three_clients(
    rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_cohorts(monkeypatch, COHORTS)
    found = go(trio(), FedVARP(alpha=0.1), rounds)
    expected = torch.tensor(ITERATES[rounds - 1], dtype=torch.float64)
    assert (found.x + torch.tensor(START)).tolist() == pytest.approx(expected.tolist(), abs=1e-13)
    assert found.trace["bytes_up"][rounds] == found.trace["bytes_down"][rounds] == 2 * 2 * 8


def test_y_is_the_mean_of_what_is_remembered() -> None:
    sim = Simulation(
        trio(), "linear", [FedVARP(alpha=0.1)], rounds=30, **OPTIONS, **ONE_OF_THREE, seed=4
    )
    run(sim, 30)
    expected = sum(p * y for p, y in zip(sim.p.tolist(), sim.now.memory, strict=True))
    torch.testing.assert_close(sim.server.y, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("eta", [1.0, 0.6])
def test_with_all_clients_it_is_fedavg(quad: Federation, eta: float) -> None:
    expected = go(quad, FedAvg(alpha=0.3, eta=eta), 12)
    found = go(quad, FedVARP(alpha=0.3, eta=eta), 12)
    close(found.x, expected.x, 1e-13)
    lengths = expected.trace["grad_norm"][1:]
    assert found.trace["grad_norm"][1:] == pytest.approx(lengths, rel=1e-11)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_reaches_the_fixed_point_of_fedavg_with_one_of_three_clients(seed: int) -> None:
    """The mean S of the S_i has no eigenvalue below 0.29. Steps of 0.3 shrink the distance by
    0.914 in a round, on average, and 0.914^400 < 1e-15; the bound leaves a factor of 1e8 for what
    is remembered late."""
    fixed = go(trio(), FedAvg(alpha=0.1), 300).x
    found = go(trio(), FedVARP(alpha=0.1, eta=0.3), 400, **ONE_OF_THREE, seed=seed).x
    assert (found - fixed).norm() < 1e-7


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_fedavg_does_not(seed: int) -> None:
    """At its fixed point the updates of the three clients have lengths 0.32, 0.47 and 0.22.

    At a distance r from it a step is at least 0.3 (0.22 - 0.64 r) long, so that two iterates in a
    row cannot both be nearer than r if 2 r is less: one is at 0.03 or beyond.
    """
    fixed = go(trio(), FedAvg(alpha=0.1), 300).x
    plain = FedAvg(alpha=0.1, eta=0.3)
    last = [go(trio(), plain, k, **ONE_OF_THREE, seed=seed).x for k in (100, 101)]
    assert max((x - fixed).norm() for x in last) > 0.029


def test_a_client_that_stays_away_leaves_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Client 3 answers once. The others weigh 0.8, so their sum exceeds 20 after 26 rounds."""
    fix_cohorts(monkeypatch, [[0, 1, 2], *[[0, 1]] * 40])
    sim = Simulation(trio(), "linear", [FedVARP(alpha=0.1)], rounds=41, **OPTIONS)
    run(sim, 26)
    assert sim.now.memory[2].norm() > 0
    run(sim, 28)
    assert sim.now.memory[2].norm() == 0
    expected = 0.5 * sim.now.memory[0] + 0.3 * sim.now.memory[1]
    torch.testing.assert_close(sim.server.y, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("values", "message"), [({"eta": 0}, "eta must be > 0"), ({"alpha": -1}, "alpha must be > 0")]
)
def test_wrong_values_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FedVARP(**values)
