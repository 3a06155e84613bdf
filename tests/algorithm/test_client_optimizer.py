"""The simulator's clients step as torch's optimizers do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fedsso
from fedsso.algorithm.client_optimizer import KINDS

ROWS = 12
STEPS = 7
SINGLE = 1e-5  # float32, a few steps


def federation() -> fedsso.Federation:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * ROWS, 4, generator=generator)
    y = torch.randint(0, 3, (2 * ROWS,), generator=generator)
    owner = [0] * ROWS + [1] * ROWS
    return fedsso.Federation.from_arrays(x, y, owner, test_fraction=0, classes=3)


def optimizer_of(kind: str, parameters: object, decay: float) -> torch.optim.Optimizer:
    made = {
        "sgd": lambda p: torch.optim.SGD(p, 0.1, weight_decay=decay),
        "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=decay),
        "adam": lambda p: torch.optim.Adam(p, 0.1, weight_decay=decay),
        "adamw": lambda p: torch.optim.AdamW(p, 0.1, weight_decay=decay),
    }
    return made[kind](parameters)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_two_rounds_are_those_of_torch(kind: str, decay: float) -> None:
    """All rows in each step, so that nothing is drawn; the optimizer is new in each round."""
    fed = federation()
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    run = fedsso.simulate(
        fed,
        copy.deepcopy(model),
        fedsso.FedAvg(alpha=0.1),
        rounds=2,
        local_steps=STEPS,
        batch_size=None,
        client=kind,
        client_weight_decay=decay,
    )
    for _ in range(2):
        after = []
        for client in range(2):
            own = copy.deepcopy(model)
            optimizer = optimizer_of(kind, own.parameters(), decay)
            rows = fed.rows_of(client)
            for _ in range(STEPS):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(own(fed.x[rows].float()), fed.y[rows])
                loss.backward()
                optimizer.step()
            after.append(nn.utils.parameters_to_vector(own.parameters()).detach())
        nn.utils.vector_to_parameters((after[0] + after[1]) / 2, model.parameters())
    expected = nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(run.x, expected, rtol=SINGLE, atol=SINGLE)


def test_an_algorithm_that_prescribes_its_clients_work_refuses_another() -> None:
    with pytest.raises(fedsso.InputError, match=r"SCAFFOLD.*client='adam'.*client='sgd'"):
        fedsso.simulate(federation(), "mclr", "scaffold", rounds=1, client="adam")
    with pytest.raises(fedsso.InputError, match=r"alpha='auto'.*alpha=0.001"):
        fedsso.simulate(federation(), "mclr", "fedsso", rounds=1, client="adamw")


def test_an_unknown_optimizer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(fedsso.InputError, match=r"client.*adam, adamw, momentum, sgd"):
        fedsso.simulate(federation(), "mclr", "fedavg", rounds=1, client="rmsprop")
