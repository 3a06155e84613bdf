"""FedExP by hand.

The three quadratics of `trio`, alpha = 0.1, tau = 2, all clients, from (4, -3). Two steps with A
take x to x - 0.1 A (2 - 0.1 A) (x - b), so the factor of b - x is 0.19 for A = 1, 0.36 for 2,
0.64 for 4; that of A_3 is 0.2 A_3 - 0.01 A_3^2 = [[0.5, 0.15], [0.15, 0.35]], since A_3^2 = [[10,
5], [5, 5]].

Round 1   b - x = (-3, 3), (-5, 5), (-4, 4)
          Delta = (-0.57, 1.92), (-1.8, 0.95), (-1.4, 0.8)
          mean (-0.285 - 0.54 - 0.28, 0.96 + 0.285 + 0.16) = (-1.105, 1.405), |mean|^2 = 3.19505
          |Delta_i|^2 = 4.0113, 4.1425, 2.6, mean 3.7684, which is below 2 * 3.19505: eta = 1
          x = (2.895, -1.595); evaluated is (3.4475, -2.2975)
Round 2   b - x = (-1.895, 1.595), (-3.895, 3.595), (-2.895, 2.595)
          Delta = (-0.36005, 1.0208), (-1.4022, 0.68305), (-1.05825, 0.474)
          mean (-0.812335, 0.810115): x = (2.082665, -0.784885)

Near the minimiser (0.2/13, 4.8/13) of f the mean all but vanishes, and the clients' updates do not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quadratics import OPTIONS, START, close, go, trio

from fedsso import FedAvg, Federation, FedExP, Run
from fedsso.data import quadratic
from fedsso.engine.simulate import run
from fedsso.errors import InputError
from fedsso.experiment.stepper import Simulation

HAND = FedExP(alpha=0.1, eps=1e-3)
ITERATES = ([4, -3], [2.895, -1.595], [2.082665, -0.784885])


def wide(numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def after(fed: Federation, algorithm: FedExP, rounds: int) -> Any:
    """The server's state."""
    sim = Simulation(fed, "linear", [algorithm], rounds=rounds, **OPTIONS)
    run(sim, rounds)
    return sim.server


def moved(x: torch.Tensor) -> list[float]:
    """From the coordinates of `trio` to those of the problem."""
    back: list[float] = (x + wide(START)).tolist()
    return back


@pytest.mark.parametrize("rounds", [1, 2])
def test_two_rounds(rounds: int) -> None:
    state = after(trio(), HAND, rounds)
    assert moved(state.x[0]) == pytest.approx(ITERATES[rounds], abs=1e-13)
    assert moved(state.before[0]) == pytest.approx(ITERATES[rounds - 1], abs=1e-13)


@pytest.mark.parametrize("rounds", [1, 2])
def test_the_mean_of_the_last_two_iterates_is_evaluated(rounds: int) -> None:
    result: Run = go(trio(), HAND, rounds)
    last = wide(ITERATES[rounds - 1 : rounds + 1]).mean(0)
    assert moved(result.x) == pytest.approx(last.tolist(), abs=1e-13)


def test_trace() -> None:
    """Two numbers go down to each of three clients, and three come back."""
    trace = go(trio(), HAND, 1).trace
    assert trace["bytes_down"][1] == 3 * 2 * 8
    assert trace["bytes_up"][1] == 3 * 3 * 8
    assert trace["stretch"][1] == 1
    assert trace["grad_norm"][1] == pytest.approx(3.19505**0.5 / 0.2, rel=1e-13)


def test_it_extrapolates_where_clients_disagree() -> None:
    """At (0.05, -0.02) from the minimiser of f.

    The factors above give Delta_i = S_i (b_i - x), and these eta.
    """
    x = wide([0.2 / 13 + 0.05, 4.8 / 13 - 0.02])
    S = wide([[[0.19, 0], [0, 0.64]], [[0.36, 0], [0, 0.19]], [[0.5, 0.15], [0.15, 0.35]]])
    b, p = wide([[1, 0], [-1, 2], [0, 1]]), wide([0.5, 0.3, 0.2])
    delta = torch.einsum("nij,nj->ni", S, b - x)
    eta = p @ delta.square().sum(1) / (2 * ((p @ delta).square().sum() + 1e-3))
    assert float(eta) == pytest.approx(33.728285303, abs=1e-9)
    near = trio((float(x[0]), float(x[1])))
    state = after(near, HAND, 1)
    assert float(state.eta) == pytest.approx(float(eta), rel=1e-12)
    close(state.x[0], eta * (p @ delta), 1e-12)
    assert go(near, HAND, 1).trace["stretch"][1] == pytest.approx(float(eta), rel=1e-12)


def test_equal_clients_are_those_of_fedavg() -> None:
    """The mean of equal updates is as long as each of them: the ratio is below 1/2."""
    fed = quadratic([[[1, 0], [0, 2]]] * 3, [[1, 2]] * 3)
    plain = [go(fed, FedAvg(alpha=0.1), rounds).x for rounds in (3, 4)]
    state = after(fed, FedExP(alpha=0.1, eps=1e-9), 4)
    close(state.x[0], plain[1], 1e-14)
    close(state.before[0], plain[0], 1e-14)


def test_a_large_eps_is_fedavg(quad: Federation) -> None:
    state = after(quad, FedExP(alpha=0.3, eps=1e6), 7)
    close(state.x[0], go(quad, FedAvg(alpha=0.3), 7).x, 1e-14)


def test_fewer_rounds_than_fedavg_where_one_model_suits_all_clients() -> None:
    """Clients with a common minimiser that each know one direction well: the mean of N updates is
    N times shorter than each, so eta is about N / 2."""
    N = 8
    A = torch.eye(N).double().repeat(N, 1, 1) * 1e-3
    for i in range(N):
        A[i, i, i] = 1.0
    fed = quadratic(A, torch.ones(N, N))
    ahead = go(fed, FedExP(alpha=0.5, eps=1e-9), 12).x
    plain = go(fed, FedAvg(alpha=0.5), 12).x
    assert (ahead - 1).norm() < 0.5 * (plain - 1).norm()


@pytest.mark.parametrize(
    ("values", "message"),
    [({"eps": 0}, "eps must be > 0"), ({"alpha": -1}, "alpha must be > 0")],
)
def test_wrong_values_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FedExP(**values)
