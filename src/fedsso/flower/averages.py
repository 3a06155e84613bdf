"""Averages that a minority of lying clients cannot move far.

They take the replies of all clients as one tensor [clients, ...] and ignore the clients' weights.
A client chooses the weight that it reports, so a weighted median would let one client win.

    median
        The median of each coordinate. Flower calls it FedMedian.
    trimmedavg:BETA
        The mean of each coordinate, without the share BETA of the clients at either end. Flower
        calls it FedTrimmedAvg. BETA is 0.2 by default.

Yin et al. 2018, Byzantine-robust distributed learning.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import nan

from torch import Tensor

from ..errors import InputError, unknown

MEAN = "mean"
BETA = 0.2
Average = Callable[[Tensor], Tensor]
"""A function from [clients, ...] to [...]."""


def median(stacked: Tensor) -> Tensor:
    """The median of each coordinate.

    Of an even number of clients, it is the mean of the two in the middle.

    >>> import torch
    >>> median(torch.tensor([1.0, 2.0, 99.0]))
    tensor(2.)
    """
    below = (len(stacked) - 1) // 2
    return _middle(stacked, below)


def trimmed_avg(stacked: Tensor, beta: float = BETA) -> Tensor:
    """The mean of each coordinate, without the lowest and the highest share `beta`.

    At either end int(beta * clients) values are left out. With few clients this can be none: 0.2 of
    four clients is 0.8, and the result is the plain mean.

    >>> import torch
    >>> trimmed_avg(torch.tensor([1.0, 2.0, 3.0, 4.0, 99.0]))
    tensor(3.)
    """
    cut = int(beta * len(stacked))
    return _middle(stacked, cut)


def average(text: str) -> Average | None:
    """The average that a text names, such as "median". None stands for the weighted mean.

    Args:
        text: "mean", "median", "trimmedavg", or "trimmedavg:BETA" with BETA in [0, 0.5).

    Returns:
        A function from [clients, ...] to [...]. The weighted mean is no such function, because it
        also needs the weights. The caller computes it where this returns None.

    Raises:
        InputError: The name does not exist, or the share would cut everything.
    """
    name, _, value = str(text).partition(":")
    if name == MEAN and not value:
        return None
    if name == "median" and not value:
        return median
    if name != "trimmedavg":
        raise unknown("average", text, (MEAN, "median", f"trimmedavg:{BETA}"))
    beta = _share(value) if value else BETA
    if not 0 <= beta < 0.5:
        raise InputError(
            f"trimmedavg:BETA needs a share in [0, 0.5), such as 'trimmedavg:0.2'; got {text!r}"
        )
    return partial(trimmed_avg, beta=beta)


def _middle(stacked: Tensor, cut: int) -> Tensor:
    """The mean of each coordinate without the `cut` lowest and the `cut` highest values."""
    in_order = stacked.sort(0).values
    end = len(stacked) - cut
    return in_order[cut:end].mean(0)


def _share(text: str) -> float:
    """The number that a text stands for. NaN if it is none.

    NaN lies in no interval, so the caller's check of the range refuses it as well.
    """
    try:
        return float(text)
    except ValueError:
        return nan
