"""The drift of the client step that FedSSO chooses, by the model and by who answers."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fedsso import Federation, FedSSO, InputError, load, lora, simulate
from fedsso.algorithm.contract import Attendance, Cohort
from fedsso.algorithms import client_step, trust_region
from fedsso.engine.settings import Settings
from fedsso.engine.simulate import attendance_of
from fedsso.models import build

LAYERS = [(2, 5), (4, 5)]  # two layers of 10 and 20 numbers


def test_a_network_begins_with_more_drift_which_fades() -> None:
    """y = L s in every round: alpha = drift / (tau L), from 0.7 down to 0.2."""
    found = []
    choice = client_step.start(torch.zeros(1, 3, dtype=torch.float64))
    products = torch.tensor([[[1.0, 4.0, 0.0], [4.0, 16.0, 0.0], [0.0, 0.0, 1.0]]]).double()
    for k in range(2, 400):
        everybody = Cohort(k, 4, torch.arange(4), 1.0, 5.0)
        choice = client_step.choose(choice, products, everybody, "fading")
        found.append(float(choice.alpha) * 5 * 4)
    wanted = [0.2 + 0.5 * math.exp(-k / 30) for k in range(2, 400)]
    assert found == pytest.approx(wanted, rel=1e-12)
    assert found[0] > 0.66
    assert found[-1] < 0.2001


@pytest.mark.parametrize(
    ("kind", "drift"), [("gentle", 0.05), ("large", 0.2), ("steady", 0.1), ("small", 0.02)]
)
def test_all_other_drifts_stay_as_they_are(kind: str, drift: float) -> None:
    """alpha = drift / (tau L) with L = 4; after the rounds that choose, a pair counts no longer."""
    choice = client_step.start(torch.zeros(1, 3, dtype=torch.float64))
    products = torch.tensor([[[1.0, 4.0, 0.0], [4.0, 16.0, 0.0], [0.0, 0.0, 1.0]]]).double()
    for k in range(2, 12):
        flatter = products if k <= client_step.CHOOSING else products / 100
        flatter = torch.cat((products[:, :1], flatter[:, 1:]), 1)
        everybody = Cohort(k, 4, torch.arange(4), 1.0, 5.0)
        choice = client_step.choose(choice, flatter, everybody, kind)
        assert float(choice.alpha) == pytest.approx(drift / (5 * 4), rel=1e-12)


@pytest.mark.parametrize(
    ("size", "mass", "kind", "last"),
    [
        (4, 1.0, "fading", 5),
        (4, 1 + 1e-7, "fading", 5),
        (2, 0.5, "fading", 10),
        (2, 0.1, "fading", 50),
        (1, 0.1, "fading", 5),
        (4, 1.0, "gentle", 5),
        (2, 0.1, "gentle", 50),
        (1, 0.1, "gentle", 5),
        (2, 0.1, "steady", 5),
        (4, 1.0, "small", 5),
    ],
)
def test_a_network_with_absent_clients_chooses_for_longer(
    size: int, mass: float, kind: str, last: float
) -> None:
    """The last round counts a flatter pair, the next one does not; nor does an undone run."""
    assert client_step.last_choice(size, mass, kind) == pytest.approx(last, rel=1e-12)
    steep = client_step.start(torch.zeros(1, 3, dtype=torch.float64))
    steep = steep._replace(L=torch.full_like(steep.L, 8.0))
    flat = torch.tensor([[[1.0, 2.0, 0.0], [2.0, 4.0, 0.0], [0.0, 0.0, 1.0]]]).double()

    def seen(k: int, before: client_step.Choice) -> float:
        cohort = Cohort(k, size, torch.arange(size), mass, 5.0)
        return float(client_step.choose(before, flat, cohort, kind).L)

    assert seen(round(last), steep) == 2.0
    assert seen(round(last) + 1, steep) == 8.0
    undone = steep._replace(undone=torch.ones_like(steep.undone))
    assert seen(round(last) + 1, undone) == 8.0


@pytest.mark.parametrize(
    ("absent", "share", "linear"),
    [(False, 1.0, "small"), (True, 1.0, "steady"), (True, 0.15, "steady"), (True, 0.14, "large")],
)
def test_the_drift_follows_the_model_and_who_answers(
    absent: bool, share: float, linear: str
) -> None:
    """And of a network, whether there is a metric."""
    auto = FedSSO()
    attendance = Attendance(20, absent, share=share)
    assert auto.fit([10], LAYERS[:1]).join(attendance, 10).drift == linear
    assert auto.fit([10, 20], LAYERS).join(attendance, 30).drift == "gentle"
    without = replace(auto, shapes="none")
    assert without.fit([10], LAYERS[:1]).join(attendance, 10).drift == linear
    assert without.fit([10, 20], LAYERS).join(attendance, 30).drift == "fading"
    given = replace(auto, drift="steady")
    assert given.fit([10, 20], LAYERS).join(attendance, 30).drift == "steady"


def test_an_unknown_drift_is_refused() -> None:
    with pytest.raises(InputError, match="unknown drift 'smal'; did you mean 'small'"):
        FedSSO(drift="smal")


def test_a_run_shows_it() -> None:
    """After the rounds in which alpha is chosen it stays, but falls for a network without a
    metric."""
    digits = load("digits", clients=5)

    def alphas(model: str, shapes: str) -> list[float]:
        run = simulate(digits, model, FedSSO(shapes=shapes), rounds=12, local_steps=50)
        return list(run.trace["alpha"])

    linear, network = alphas("mclr", "auto"), alphas("mlp", "auto")
    assert len(set(linear[7:])) == len(set(network[7:])) == 1
    assert network[-1] < client_step.LARGEST
    fading = alphas("mlp", "none")
    assert fading[7:] == sorted(fading[7:], reverse=True)
    assert fading[-1] < fading[7] < client_step.LARGEST


@pytest.mark.parametrize(
    ("given", "exact"),
    [
        ({}, True),
        ({"batch_size": 10_000}, True),
        ({"local_steps": None, "local_epochs": 1}, True),
        ({"loss": "cross_entropy"}, True),
        ({"stragglers": 0.5}, True),  # who takes some of one step takes it
        ({"batch_size": 100}, False),
        ({"local_steps": 2}, False),
        ({"local_steps": None, "local_epochs": 2}, False),
        ({"participation": 0.5}, False),
        ({"drop_rate": 0.1}, False),
        ({"compress": "int8"}, False),
        ({"client": "momentum"}, False),
        ({"loss": torch.nn.functional.cross_entropy}, False),
    ],
)
def test_the_engine_says_whether_gradients_are_exact(given: dict[str, Any], exact: bool) -> None:
    digits = load("digits", clients=5)
    settings = Settings(**{"batch_size": None, "local_steps": 1} | given)
    model = build("mclr", digits.sample_shape, digits.classes)
    assert attendance_of(digits, settings, model).exact == exact


def test_gradients_are_exact_of_a_linear_model_alone() -> None:
    """With an adapter, a frozen layer or dropout the loss is not convex, or the gradient drawn."""
    digits = load("digits", clients=5)
    settings = Settings(batch_size=None, local_steps=1)
    linear = build("mclr", digits.sample_shape, digits.classes)
    others = [lora(linear, 2), nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(64, 10))]
    network = build("mlp", digits.sample_shape, digits.classes)
    others.append(network)
    frozen = copy.deepcopy(network)
    for weight in list(frozen.parameters())[:2]:
        weight.requires_grad_(False)
    others.append(frozen)
    for module in others:
        assert not attendance_of(digits, settings, module).exact


def test_no_drift_where_gradients_are_exact() -> None:
    """Only under the guard that asks what the clients do, for one layer, and if nothing is set.

    Without a penalty curvature may be below lam, and pairs would be overridden.
    """
    attendance = Attendance(4, exact=True, l2=1e-4)
    assert FedSSO().fit([10]).join(attendance._replace(l2=0.0), 10).drift == "small"
    assert FedSSO().fit([10]).join(attendance, 10).drift == "none"
    assert FedSSO().fit([10, 20], LAYERS).join(attendance, 30).drift == "gentle"
    assert FedSSO(shapes="none").fit([10, 20], LAYERS).join(attendance, 30).drift == "fading"
    assert FedSSO(drift="small").fit([10]).join(attendance, 10).drift == "small"
    for guard in ("cautious", "none"):
        assert FedSSO(guard=guard).fit([10]).join(attendance, 10).drift == "small"


@pytest.mark.parametrize(("k", "undone", "most"), [(2, 0, 1000), (3, 0, 10), (2, 1, 2), (3, 1, 2)])
@pytest.mark.parametrize("capped", [True, False])
def test_an_exact_gradient_is_trusted_further(
    k: int, undone: int, most: float, capped: bool
) -> None:
    """m = 1, 4/5 and 1/2 as ever, and at most what round k allows; t = 1/2, gamma = 5."""
    one = torch.ones(4, 1, dtype=torch.float64)
    guard = trust_region.Guard(
        radius=3 * one, gamma=5 * one, slope=2 * one, share=0.5 * one, capped=(one > 0) & capped
    )
    products = torch.zeros(4, 3, 3, dtype=torch.float64)
    products[:, 0, 2] = 2 * torch.tensor([0, 0.25, 3, -0.9999])  # g^T s
    m = [1, 0.8, 0.5, most]
    trust = trust_region.exact(k, undone * one, 1e-4)
    found = trust_region.adapt(guard, products, 0.1, trust)
    factors = [max(1, part / 2) if capped else part / 2 for part in m]
    gammas = [max(1.0, 5 * factor) for factor in factors]
    radii = [3 * part if capped else 3 * min(1, part) for part in m]
    assert found.gamma[:, 0].tolist() == pytest.approx(gammas, rel=1e-12)
    assert found.radius[:, 0].tolist() == pytest.approx(radii, rel=1e-12)
    flattest = trust_region.adapt(guard, products, 0.1, trust_region.exact(k, 0 * one, 0.5))
    assert flattest.gamma.max() <= 2


def test_exact_gradients_need_fewer_rounds() -> None:
    """Features a fiftieth of the usual size: but for the two biases, curvature is about l2 = 1e-3.

    Of these 16 directions only some are known after 16 rounds. In the others B = I / gamma is ten
    times too steep where gamma ends at 100, and right where it may go on to 1000.
    """
    draw = torch.Generator().manual_seed(5)
    x = 0.02 * torch.randn(300, 8, generator=draw)
    y = (x @ torch.ones(8) + 0.02 * torch.randn(300, generator=draw) > 0).long()
    fed = Federation.from_clients([(x[:150], y[:150]), (x[150:], y[150:])])
    given = {"rounds": 16, "local_steps": 1, "batch_size": None, "l2": 1e-3, "dtype": "float64"}
    bold = simulate(fed, "mclr", FedSSO(), **given).trace
    careful = simulate(fed, "mclr", FedSSO(drift="small"), **given).trace
    assert bold["grad_norm"][-1] < 0.05 * careful["grad_norm"][-1]
    assert careful["gamma"][-1] == trust_region.FLATTEST < bold["gamma"][-1]
    assert set(bold["alpha"][1:]) == {client_step.FIRST}


@pytest.mark.parametrize(
    ("clients", "participation", "share"),
    [(20, 1.0, 1.0), (20, 0.1, 0.1), (10, 0.25, 0.2), (4, 0.05, 0.25), (3, 0.5, 2 / 3)],
)
def test_a_run_tells_what_part_of_its_clients_is_asked(
    clients: int, participation: float, share: float
) -> None:
    """Of four clients, one at least."""
    fed = load("digits", clients=clients)
    known = attendance_of(fed, Settings(participation=participation), build("mclr", (8, 8), 10))
    assert known.share == pytest.approx(share)
