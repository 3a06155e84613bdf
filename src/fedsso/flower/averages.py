"""Averages over stacked replies [clients, ...] that a minority of liars cannot move far; they know
no weights.

    median              of each coordinate (Flower's FedMedian)
    trimmedavg:BETA     the mean of each coordinate without the share BETA at either end (FedTrimmedAvg); 0.2 by default

Yin et al. 2018, Byzantine-robust distributed learning.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import nan

from torch import Tensor

from ..errors import InputError, unknown

MEAN, BETA = "mean", 0.2
Average = Callable[[Tensor], Tensor]
"""[clients, ...] -> [...]"""


def median(stacked: Tensor) -> Tensor:
    """The coordinate-wise median; of an even number of clients the mean of the two in the middle."""
    return _middle(stacked, (len(stacked) - 1) // 2)


def trimmed_avg(stacked: Tensor, beta: float = BETA) -> Tensor:
    """The coordinate-wise mean without the lowest and the highest share beta."""
    return _middle(stacked, int(beta * len(stacked)))


def average(text: str) -> Average | None:
    """The average that a text names; None is the weighted mean."""
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
    return stacked.sort(0).values[cut : len(stacked) - cut].mean(0)


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return nan
