"""The drift of the client step that FedSSO chooses, by the model and by who answers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fedsso import FedSSO, InputError, load, simulate
from fedsso.algorithm.contract import Attendance
from fedsso.algorithms import client_step


def test_a_network_begins_with_more_drift_which_fades() -> None:
    """y = L s in every round: alpha = drift / (tau L), from 0.7 down to 0.2."""
    found = []
    choice = client_step.start(torch.zeros(1, 3, dtype=torch.float64))
    products = torch.tensor([[[1.0, 4.0, 0.0], [4.0, 16.0, 0.0], [0.0, 0.0, 1.0]]]).double()
    for k in range(2, 400):
        choice = client_step.choose(choice, products, 5.0, torch.full((1, 1), k).double(), "fading")
        found.append(float(choice.alpha) * 5 * 4)
    wanted = [0.2 + 0.5 * math.exp(-k / 30) for k in range(2, 400)]
    assert found == pytest.approx(wanted, rel=1e-12)
    assert found[0] > 0.66
    assert found[-1] < 0.2001


@pytest.mark.parametrize(("absent", "linear"), [(False, "small"), (True, "steady")])
def test_the_drift_follows_the_model_and_who_answers(absent: bool, linear: str) -> None:
    auto = FedSSO()
    attendance = Attendance(4, absent)
    assert auto.fit([10]).join(attendance, 10).drift == linear
    assert auto.fit([10, 20]).join(attendance, 30).drift == "fading"
    given = replace(auto, drift="steady")
    assert given.fit([10, 20]).join(attendance, 30).drift == "steady"


def test_an_unknown_drift_is_refused() -> None:
    with pytest.raises(InputError, match="unknown drift 'smal'; did you mean 'small'"):
        FedSSO(drift="smal")


def test_a_run_shows_it() -> None:
    """After the rounds in which alpha is chosen it stays for one layer, and falls for a network."""
    digits = load("digits", clients=5)
    linear = simulate(digits, "mclr", FedSSO(), rounds=12, local_steps=50).trace["alpha"]
    network = simulate(digits, "mlp", FedSSO(), rounds=12, local_steps=50).trace["alpha"]
    assert len(set(linear[7:])) == 1
    assert list(network[7:]) == sorted(network[7:], reverse=True)
    assert network[-1] < network[7] < client_step.LARGEST
