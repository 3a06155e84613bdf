"""Models that read a sample as one vector: tables, texts, and images without regard to their shape."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import nn


def linear(sample: Sequence[int], outputs: int) -> nn.Module:
    """One linear map without bias."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(sample), outputs, bias=False))


def mclr(sample: Sequence[int], outputs: int) -> nn.Module:
    """Multi-class logistic regression (the paper's convex model; d = 7 850 on MNIST)."""
    return _layers(prod(sample), outputs)


def mlp(sample: Sequence[int], outputs: int) -> nn.Module:
    """One hidden layer of 32 units."""
    return _layers(prod(sample), 32, outputs)


def charmlp(sample: Sequence[int], outputs: int) -> nn.Module:
    """Next character of a text: one hidden layer of 128 units on one-hot characters [window,
    alphabet].

    With a window of 50 and an alphabet of 65, d = 424 513; 256 units predict no better.
    """
    return _layers(prod(sample), 128, outputs)


def textmlp(sample: Sequence[int], outputs: int) -> nn.Module:
    """The paper's network for Sentiment140, hidden layers of 64 and 32 units, sizes that the paper
    does not give.

    Without its dropout of 0.1, with which clients cannot be stacked: a round of 50 clients with
    batches of 10 rows took 4 times as long with 1024 features, 7 times with 300.
    """
    return _layers(prod(sample), 64, 32, outputs)


def _layers(*widths: int) -> nn.Module:
    """Linear layers with ReLU between them."""
    inner = [layer for pair in pairwise(widths) for layer in (nn.ReLU(), nn.Linear(*pair))]
    return nn.Sequential(nn.Flatten(), *inner[1:])
