"""Models that read a sample as one vector: tables, texts, images whose shape does not matter.

Every function takes the shape of a sample and the number of outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import nn


def linear(sample: Sequence[int], outputs: int) -> nn.Module:
    """One linear map without bias."""
    layer = nn.Linear(prod(sample), outputs, bias=False)
    return nn.Sequential(nn.Flatten(), layer)


def mclr(sample: Sequence[int], outputs: int) -> nn.Module:
    """Multi-class logistic regression (the paper's convex model; d = 7 850 on MNIST)."""
    return _layers(prod(sample), outputs)


def mlp(sample: Sequence[int], outputs: int) -> nn.Module:
    """One hidden layer of 32 units."""
    return _layers(prod(sample), 32, outputs)


def charmlp(sample: Sequence[int], outputs: int) -> nn.Module:
    """Predicts the next character of a text, with one hidden layer of 128 units.

    Samples are one-hot characters [window, alphabet]. With a window of 50 and an alphabet of 65,
    d = 424 513; 256 units predict no better.
    """
    return _layers(prod(sample), 128, outputs)


def textmlp(sample: Sequence[int], outputs: int) -> nn.Module:
    """The paper's network for Sentiment140, with hidden layers of 64 and 32 units.

    The paper does not give these sizes. Its dropout of 0.1 is left out: with dropout clients cannot
    be stacked, and a round of 50 clients with batches of 10 rows took 4 times as long with 1024
    features, 7 times with 300.
    """
    return _layers(prod(sample), 64, 32, outputs)


def _layers(*widths: int) -> nn.Module:
    """Linear layers of these widths, from inputs to outputs, with ReLU between them."""
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        if len(layers) > 1:
            layers.append(nn.ReLU())
        layers.append(nn.Linear(before, after))
    return nn.Sequential(*layers)
