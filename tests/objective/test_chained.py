"""Convolutions of all clients and trials at once compute what one after the other does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedsso
from fedsso import Federation
from fedsso.algorithm import Batch
from fedsso.models import build
from fedsso.objective import Looped, Vmapped, objective
from fedsso.objective.backend import ravel
from fedsso.objective.chained import Chained
from fedsso.objective.losses import row_loss

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
M, T, B = 3, 2, 5
NETWORKS: dict[str, tuple[int, int, int]] = {
    "cnn": (1, 8, 8),
    "cnn-small": (2, 9, 8),
    "lenet": (3, 16, 16),
}
CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}


def strided() -> nn.Module:
    first = nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0), bias=False)
    return nn.Sequential(
        nn.Sequential(first, nn.Tanh()), nn.AvgPool2d(2, 1), nn.Flatten(), nn.Linear(3 * 3 * 5, 3)
    )


def problem(name: str) -> tuple[nn.Module, Tensor, Batch]:
    torch.manual_seed(0)
    sample = NETWORKS.get(name, (2, 8, 7))
    module = (build(name, sample, 3) if name in NETWORKS else strided()).double()
    x = ravel(module) + 0.1 * torch.randn(M, T, ravel(module).numel(), dtype=torch.float64)
    weight = torch.zeros(M, B, dtype=torch.float64)
    for i, n in enumerate((5, 3, 1)):
        weight[i, :n] = 1 / n
    rows = torch.randn(M, B, *sample, dtype=torch.float64)
    return module, x, Batch(rows, torch.randint(0, 3, (M, B)), weight, key=1)


@pytest.mark.parametrize("name", [*NETWORKS, "strided"])
def test_all_at_once_is_one_by_one(name: str) -> None:
    module, x, batch = problem(name)
    loss = row_loss("cross_entropy")
    assert Chained.fits(module, batch.x.shape[2:])
    f, g, v = Chained(module, loss), Looped(module, loss), torch.randn_like(x)
    before = x.clone()
    with torch.no_grad():
        for found, expected in zip(
            f.value_and_grad(x, batch), g.value_and_grad(x, batch), strict=True
        ):
            torch.testing.assert_close(found, expected, **CLOSE)
        torch.testing.assert_close(f.predict(x, batch.x), g.predict(x, batch.x), **CLOSE)
        torch.testing.assert_close(f.value(x, batch), g.value(x, batch), **CLOSE)
        torch.testing.assert_close(f.hvp(x, v, batch), g.hvp(x, v, batch), rtol=1e-8, atol=1e-10)
        into = torch.empty_like(x)
        assert f.value_and_grad(x, batch, out=into)[1] is into
        torch.testing.assert_close(into, g.value_and_grad(x, batch)[1], **CLOSE)
    assert torch.equal(x, before)
    assert not x.requires_grad


NOT = {
    "groups": nn.Sequential(nn.Conv2d(2, 2, 3, groups=2), nn.Flatten(), nn.Linear(2, 3)),
    "dilation": nn.Sequential(nn.Conv2d(2, 2, 3, dilation=2), nn.Flatten(), nn.Linear(2, 3)),
    "circular": nn.Sequential(
        nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(2, 3)
    ),
    "same": nn.Sequential(nn.Conv2d(2, 2, 3, padding="same"), nn.Flatten(), nn.Linear(2, 3)),
    "norm": nn.Sequential(nn.Conv2d(2, 2, 3), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(2, 3)),
    "dropout": nn.Sequential(nn.Conv2d(2, 2, 3), nn.Dropout(), nn.Flatten(), nn.Linear(2, 3)),
    "no flattening": nn.Sequential(nn.Conv2d(2, 2, 3), nn.Linear(2, 3)),
    "no convolution": nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 3)),
    "nothing after": nn.Sequential(nn.Conv2d(2, 2, 3), nn.Flatten()),
    "own class": type("Own", (nn.Sequential,), {})(
        nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(2, 3)
    ),
}


@pytest.mark.parametrize("case", NOT)
def test_what_is_no_plain_chain_is_left_to_others(case: str) -> None:
    assert not Chained.fits(NOT[case], (2, 8, 8))


def test_a_layer_used_twice_is_no_chain() -> None:
    twice = nn.Conv2d(2, 2, 3, padding=1)
    assert not Chained.fits(
        nn.Sequential(twice, nn.ReLU(), twice, nn.Flatten(), nn.Linear(128, 3)), (2, 8, 8)
    )


def test_a_processor_takes_the_loop_unless_told_otherwise() -> None:
    module, loss = build("cnn-small", (1, 8, 8), 3), row_loss("cross_entropy")
    assert isinstance(objective(module, loss, "auto", CPU, (1, 8, 8))[0], Looped)
    assert isinstance(objective(module, loss, "stacked", CPU, (1, 8, 8))[0], Chained)
    assert isinstance(objective(module, loss, "auto", CUDA, (1, 8, 8))[0], Chained)
    normed = build("resnet20-gn", (3, 32, 32), 10)
    assert isinstance(objective(normed, loss, "stacked", CPU, (3, 32, 32))[0], Vmapped)


@pytest.mark.parametrize(
    "algorithm", [fedsso.FedSSO(alpha=0.05), fedsso.GIANT(), fedsso.SCAFFOLD(alpha=0.05)], ids=str
)
def test_training_is_the_same(algorithm: Any) -> None:
    torch.manual_seed(1)
    clients = [
        (torch.randn(n, 1, 8, 8, dtype=torch.float64), torch.randint(0, 3, (n,)))
        for n in (12, 7, 9)
    ]
    fed = Federation.from_clients(clients, classes=3)
    options: dict[str, Any] = {"rounds": 3, "batch_size": 4, "dtype": "float64"}
    loop, stacked = (
        fedsso.simulate(fed, "cnn", algorithm, engine=e, **options) for e in ("loop", "stacked")
    )
    torch.testing.assert_close(stacked.x, loop.x, rtol=1e-8, atol=1e-10)
