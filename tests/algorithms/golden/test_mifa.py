"""MIFA by hand.

The three quadratics of `trio`, as in test_fedvarp.py: alpha = 0.1, p = (0.5, 0.3, 0.2), from
(4, -3). In units of updates, which is alpha y_i:

Round 1   clients 1 and 2: Delta = (-0.57, 1.92), (-1.8, 0.95)
          alpha y = 0.5 Delta_1 + 0.3 Delta_2 = (-0.825, 1.245), x = (3.175, -1.755)
Round 2   clients 2 and 3: b - x = (-4.175, 3.755), (-3.175, 2.755)
          Delta_2 = (-1.503, 0.71345), Delta_3 = (-1.17425, 0.488)
          alpha y = (-0.285 - 0.4509 - 0.23485, 0.96 + 0.214035 + 0.0976) = (-0.97075, 1.271635)
          x = (2.20425, -0.483365)

and so on, with clients 1 and 3, then 1 and 2.
"""

from __future__ import annotations

import pytest
import torch
from quadratics import OPTIONS, START, close, fix_cohorts, go, trio

from fedsso import MIFA, FedAvg, Federation
from fedsso.algorithm.schedule import Decay
from fedsso.engine.simulate import run
from fedsso.errors import InputError
from fedsso.experiment.stepper import Simulation

COHORTS = ([0, 1], [1, 2], [0, 2])
ITERATES = (
    (3.175, -1.755),
    (2.20425, -0.483365),
    (1.4630222, -0.07694515),
    (0.9771046434, 0.10377122155),
)
ONE_OF_THREE = {"participation": 1 / 3}


@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
def test_four_rounds_with_two_of_three_clients(
    rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_cohorts(monkeypatch, COHORTS)
    found = go(trio(), MIFA(alpha=0.1), rounds)
    expected = torch.tensor(ITERATES[rounds - 1], dtype=torch.float64)
    assert (found.x + torch.tensor(START)).tolist() == pytest.approx(expected.tolist(), abs=1e-13)
    assert found.trace["bytes_up"][rounds] == found.trace["bytes_down"][rounds] == 2 * 2 * 8


@pytest.mark.parametrize("eta", [1.0, 0.6])
def test_with_all_clients_it_is_fedavg(quad: Federation, eta: float) -> None:
    expected = go(quad, FedAvg(alpha=0.3, eta=eta), 12)
    found = go(quad, MIFA(alpha=0.3, eta=eta), 12)
    close(found.x, expected.x, 1e-13)
    lengths = expected.trace["grad_norm"][1:]
    assert found.trace["grad_norm"][1:] == pytest.approx(lengths, rel=1e-11)


def test_memories_count_with_the_client_step_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    """alpha falls from 0.1 to 0.05; one local step. The client that is absent in round 2 counts
    with half of its update."""
    fix_cohorts(monkeypatch, [[0, 1, 2], [0]])
    steps = Decay(0.1)
    assert (steps(1), steps(2)) == (0.1, 0.05)
    first, second = (go(trio(), MIFA(alpha=steps), k, local_steps=1).x for k in (1, 2))
    A, b = [[1, 4], [2, 1]], [[1, 0], [-1, 2]]
    begin = torch.tensor(START, dtype=torch.float64)

    def slope(i: int, x: torch.Tensor) -> torch.Tensor:
        """-A_i (x - b_i) of the first two clients, whose A_i are diagonal."""
        return torch.tensor(A[i]) * (torch.tensor(b[i]) - x - begin)

    A3 = torch.tensor([[3, 1], [1, 2]], dtype=torch.float64)
    zero = torch.zeros(2, dtype=torch.float64)
    old = [slope(0, zero), slope(1, zero), A3 @ (torch.tensor([0.0, 1.0]) - begin)]
    close(first, 0.1 * (0.5 * old[0] + 0.3 * old[1] + 0.2 * old[2]), 1e-14)
    now = 0.5 * slope(0, first) + 0.3 * old[1] + 0.2 * old[2]
    close(second, first + 0.05 * now, 1e-14)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_reaches_the_fixed_point_of_fedavg_with_one_of_three_clients(seed: int) -> None:
    """Where FedAvg ends in a ball (test_fedvarp.py). Steps of 0.3 shrink the distance by 0.914 in a
    round on average, and 0.914^400 < 1e-15; the bound leaves a factor of 1e8 for memories that are
    some rounds old."""
    fixed = go(trio(), FedAvg(alpha=0.1), 300).x
    found = go(trio(), MIFA(alpha=0.1, eta=0.3), 400, **ONE_OF_THREE, seed=seed).x
    assert (found - fixed).norm() < 1e-7


def test_a_client_that_stays_away_leaves_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Client 3 answers once. The others weigh 0.8, so their sum exceeds 20 after 26 rounds."""
    fix_cohorts(monkeypatch, [[0, 1, 2], *[[0, 1]] * 40])
    sim = Simulation(trio(), "linear", [MIFA(alpha=0.1)], rounds=41, **OPTIONS)
    run(sim, 26)
    assert sim.now.memory[2].norm() > 0
    run(sim, 28)
    assert sim.now.memory[2].norm() == 0
    expected = 0.5 * sim.now.memory[0] + 0.3 * sim.now.memory[1]
    torch.testing.assert_close(sim.server.y, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("values", "message"), [({"eta": 0}, "eta must be > 0"), ({"alpha": -1}, "alpha must be > 0")]
)
def test_wrong_values_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        MIFA(**values)
