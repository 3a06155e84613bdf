"""SCAFFOLD by hand.

Two clients, two parameters, f_i(x) = 1/2 (x - b_i)^T A_i (x - b_i):

    A_1 = diag(1, 2), b_1 = (1, 0), p_1 = 1/4        A_2 = diag(3, 1), b_2 = (0, 2), p_2 = 3/4

alpha = 0.1, tau = 2, x_1 = (0, 0). Two steps of y <- y - 0.1 (A_i (y - b_i) + e), e = c - c_i,
multiply the distance to b_i - A_i^-1 e by diag(0.81, 0.64) at client 1 and diag(0.49, 0.81) at
client 2.

Round 1   no variates yet, FedAvg: updates (0.19, 0) and (0, 0.38), x = (0.0475, 0.285)
          option II: c_i = -update / 0.2, c_1 = (-0.95, 0), c_2 = (0, -1.9), c = (-0.2375, -1.425)
Round 2   client 1: e = (0.7125, -1.425), goal (0.2875, 0.7125), distance (-0.24, -0.4275)
                    update (0.19 * 0.24, 0.36 * 0.4275) = (0.0456, 0.1539)
          client 2: e = (-0.2375, 0.475), goal (0.2375/3, 1.525), distance (-0.095/3, -1.24)
                    update (0.51 * 0.095/3, 0.19 * 1.24) = (0.01615, 0.2356)
          mean (0.0114 + 0.0121125, 0.038475 + 0.1767) = (0.0235125, 0.215175),
          x = (0.0710125, 0.500175)
          c = -mean / 0.2 = (-0.1175625, -1.075875), as sum p_i (c_i - c) = 0

Option I sets c_i to the gradients at x_1: (-1, 0) and (0, -2), c = (-0.25, -1.5). Round 2 then has
          client 1: e = (0.75, -1.5), goal (0.25, 0.75), distance (-0.2025, -0.465),
                    update (0.038475, 0.1674)
          client 2: e = (-0.25, 0.5), goal (0.25/3, 1.5), distance (-0.1075/3, -1.215),
                    update (0.018275, 0.23085)
          mean (0.009618750 + 0.01370625, 0.04185 + 0.1731375) = (0.023325, 0.2149875)
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from quadratics import OPTIONS, close, go, pair
from torch import Tensor

from fedsso import FedAvg, Federation, FedSGD, InputError
from fedsso.algorithm import Algorithm
from fedsso.algorithms.first_order.scaffold import SCAFFOLD
from fedsso.data import quadratic
from fedsso.engine.simulate import run
from fedsso.experiment.stepper import Simulation

both = pytest.mark.parametrize("option", ["I", "II"])


def state(
    fed: Federation, algorithm: Algorithm, rounds: int, **options: Any
) -> tuple[Tensor, Tensor]:
    """c and the clients' c_i after some rounds."""
    full = {**OPTIONS, **options, "rounds": rounds}
    sim = Simulation(fed, "linear", [algorithm], **full)
    run(sim, rounds)
    return sim.server.c[0], torch.stack([c[0] for c in sim.own])


@both
def test_two_rounds(option: str) -> None:
    algorithm = SCAFFOLD(alpha=0.1, option=option)
    assert go(pair(), algorithm, 1).x.tolist() == pytest.approx([0.0475, 0.285], abs=1e-14)
    moved = {"I": [0.023325, 0.2149875], "II": [0.0235125, 0.215175]}[option]
    assert go(pair(), algorithm, 2).x.tolist() == pytest.approx(
        [0.0475 + moved[0], 0.285 + moved[1]], abs=1e-14
    )


@both
def test_variates(option: str) -> None:
    algorithm = SCAFFOLD(alpha=0.1, option=option)
    c, c_i = state(pair(), algorithm, 1)
    expected = {"I": [[-1, 0], [0, -2]], "II": [[-0.95, 0], [0, -1.9]]}[option]
    assert c_i.flatten().tolist() == pytest.approx([v for row in expected for v in row], abs=1e-14)
    assert c.tolist() == pytest.approx(
        {"I": [-0.25, -1.5], "II": [-0.2375, -1.425]}[option], abs=1e-14
    )
    if option == "II":
        assert state(pair(), algorithm, 2)[0].tolist() == pytest.approx(
            [-0.1175625, -1.075875], abs=1e-14
        )


@both
def test_trace(option: str) -> None:
    trace = go(pair(), SCAFFOLD(alpha=0.1, option=option), 2).trace
    assert trace["train_loss"][1] == pytest.approx(1.470625, rel=1e-14)  # FedAvg's
    assert trace["grad_norm"][1] == pytest.approx(math.hypot(0.2375, 1.425), rel=1e-14)
    assert trace["bytes_up"][1:].tolist() == trace["bytes_down"][1:].tolist() == [2 * 2 * 2 * 8] * 2


@both
def test_server_step(option: str) -> None:
    algorithm = SCAFFOLD(alpha=0.1, eta=0.5, option=option)
    assert go(pair(), algorithm, 1).x.tolist() == pytest.approx([0.02375, 0.1425], abs=1e-14)


@both
def test_first_round_is_fedavg(quad: Federation, option: str) -> None:
    a = go(quad, SCAFFOLD(alpha=0.3, option=option), 1, local_steps=4, batch_size=2)
    close(a.x, go(quad, FedAvg(alpha=0.3), 1, local_steps=4, batch_size=2).x, 1e-14)


@both
def test_one_client_is_local_sgd(option: str) -> None:
    fed = quadratic([[[3, 1], [1, 2]]], [[1, -2]])
    options = {"local_steps": 4, "batch_size": None}
    close(
        go(fed, SCAFFOLD(alpha=0.1, option=option), 6, **options).x,
        go(fed, FedAvg(alpha=0.1), 6, **options).x,
    )


@both
def test_one_step_is_distributed_gradient_descent(quad: Federation, option: str) -> None:
    a = go(quad, SCAFFOLD(alpha=0.3, option=option), 7, local_steps=1)
    close(a.x, go(quad, FedSGD(alpha=0.3), 7).x)


@both
def test_limit_is_the_minimiser(quad: Federation, option: str) -> None:
    assert quad.optimum is not None
    close(
        go(quad, SCAFFOLD(alpha=0.2, option=option), 80, local_steps=7, eval_every=80).x,
        quad.optimum,
    )


@both
def test_server_holds_the_weighted_mean_of_all_variates(quad: Federation, option: str) -> None:
    harsh = {
        "participation": 0.5,
        "drop_rate": 0.3,
        "stragglers": 0.5,
        "local_steps": 4,
        "batch_size": 2,
    }
    c, c_i = state(quad, SCAFFOLD(alpha=0.1, option=option), 12, **harsh)
    close(quad.p @ c_i, c, 1e-13)
    assert c.norm() > 0.01


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"option": "III"}, "unknown option 'III'"),
        ({"alpha": 0}, "alpha must be > 0"),
        ({"eta": -1}, "eta must be > 0"),
    ],
)
def test_wrong_values(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SCAFFOLD(**wrong)
