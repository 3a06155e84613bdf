"""Models by name; any other `nn.Module` works as well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from ..errors import InputError, unknown


@dataclass(frozen=True)
class Model:
    """A registered model: how to build it from the sample's shape and the number of outputs."""

    build: Callable[[Sequence[int], int], nn.Module]
    title: str
    init: str = "default"


def linear(sample: Sequence[int], outputs: int) -> nn.Module:
    """One linear map without bias."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(sample), outputs, bias=False))


def mclr(sample: Sequence[int], outputs: int) -> nn.Module:
    """Multi-class logistic regression (the paper's convex model; d = 7 850 on MNIST)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(sample), outputs))


def mlp(sample: Sequence[int], outputs: int) -> nn.Module:
    """One hidden layer of 32 units."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(sample), 32), nn.ReLU(), nn.Linear(32, outputs))


def cnn(sample: Sequence[int], outputs: int) -> nn.Module:
    """The paper's small CNN as reconstructed from its parameter count and released curves (d = 6 230 on MNIST)."""
    c, h, w = _image(sample, "cnn")
    return nn.Sequential(
        nn.Conv2d(c, 1, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear((h // 2) * (w // 2), 30),
        nn.Linear(30, outputs),
    )


def cnn_small(sample: Sequence[int], outputs: int) -> nn.Module:
    """Two real convolutions of 8 and 16 channels and a linear layer."""
    c, h, w = _image(sample, "cnn-small")
    return nn.Sequential(
        nn.Conv2d(c, 8, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * (h // 4) * (w // 4), outputs),
    )


MODELS: dict[str, Model] = {
    "linear": Model(linear, "one linear map without bias", init="zero"),
    "mclr": Model(mclr, "multi-class logistic regression", init="zero"),
    "mlp": Model(mlp, "one hidden layer of 32 units"),
    "cnn": Model(cnn, "the paper's CNN, 6 230 parameters on MNIST"),
    "cnn-small": Model(cnn_small, "two convolutions of 8 and 16 channels"),
}


def build(name: str, sample: Sequence[int], outputs: int, seed: int = 0) -> nn.Module:
    """A model by name; torch's own initialisation under `torch.manual_seed(seed)`."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name].build(sample, outputs)


def _image(sample: Sequence[int], name: str) -> tuple[int, int, int]:
    if len(sample) != 3 or min(sample[1:]) < 4:
        raise InputError(f"model {name!r} needs images [channels, height >= 4, width >= 4], got {tuple(sample)}")
    return sample[0], sample[1], sample[2]
