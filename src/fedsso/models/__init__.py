"""Models by name.

These are for convenience and for the paper's experiments; any other `nn.Module` works as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import unknown
from .images import cnn, cnn_small, lenet, resnet20_gn
from .vectors import charmlp, linear, mclr, mlp, textmlp


@dataclass(frozen=True)
class Model:
    """A registered model."""

    build: Callable[[Sequence[int], int], nn.Module]  # from a sample's shape and the outputs
    title: str
    init: str = "default"  # where training begins: torch's own weights, or zero


MODELS: dict[str, Model] = {
    "linear": Model(linear, "one linear map without bias", init="zero"),
    "mclr": Model(mclr, "multi-class logistic regression", init="zero"),
    "mlp": Model(mlp, "one hidden layer of 32 units"),
    "cnn": Model(cnn, "the paper's CNN, 6 230 parameters on MNIST"),
    "cnn-small": Model(cnn_small, "two convolutions of 8 and 16 channels"),
    "lenet": Model(lenet, "the paper's LeNet, 49 402 parameters on CIFAR-10"),
    "resnet20-gn": Model(resnet20_gn, "ResNet-20 with GroupNorm, 275 572 parameters on CIFAR-100"),
    "charmlp": Model(charmlp, "one hidden layer of 128 units, 424 513 parameters on Shakespeare"),
    "textmlp": Model(textmlp, "hidden layers of 64 and 32 units"),
}


def build(
    name: str,
    sample: Sequence[int],
    outputs: int,
    seed: int = 0,
) -> nn.Module:
    """A model by name, for samples of this shape and so many outputs.

    Its weights are torch's own initialisation under `torch.manual_seed(seed)`. The caller's stream
    of random numbers is left as it was.
    """
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name].build(sample, outputs)
