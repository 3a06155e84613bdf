"""What every claim of the theory shares: its settings, its numbers and how they are told.

A claim of the paper is tested by a function that takes an `Effort` and returns a `Section`. The
section holds the text and the table of theory.md, and the `Fact`s, which are the rows of
theory.csv. The figure is drawn from the facts alone. The names and constants that both the tests of
a claim and the figure need are therefore kept here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
"""An array of real numbers, most often one for each round."""

# ---- settings that appear in the text, in theory.csv and in the figure ----

PERIOD = 200
"""The paper's R: the matrix B is reset every R rounds."""

# the settings of Theorems 2.1 and 3.1, under the names they have in theory.csv
LINE = "d = 1, mini-batches"
EXACT = "d = 5, exact gradients"
NOISY = "d = 5, mini-batches"
RESET = f"d = 5, mini-batches, R = {PERIOD}"

# Theorem 2.1: lambda and Lambda of the problem, whose Hessian lies between 1 and 1.25
LAM = 0.8
LAM_BAR = 1.6
# Bounds of the eigenvalues of B^-1 in one dimension, where the curvature rule keeps B between
# lambda and Lambda.
KAPPA = 1 / LAM_BAR
KAPPA_BAR = 1 / LAM

# the limit of FedSSO: constant client steps, local steps and rounds
LIMIT_ALPHAS = (0.4, 0.2, 0.1, 0.05, 0.025)
LIMIT_TAU = 5
LIMIT_ROUNDS = 60


# ---- what is measured ----


class Effort(NamedTuple):
    """How thoroughly a claim is tested."""

    rounds: int
    """How many rounds a run has."""
    seeds: tuple[int, ...]
    """The seeds that a run is repeated with."""


class Fact(NamedTuple):
    """One measured number, which is one row of theory.csv."""

    claim: str
    """The claim that it belongs to, such as "Theorem 2.1"."""
    quantity: str
    """What was measured, and in which setting. The figure looks numbers up by this text."""
    seed: int | None
    """The seed of the run. None: the number belongs to no seed."""
    k: float | None
    """The round, or the mean round of a bin. None: the number belongs to no round."""
    value: float
    """The number."""


class Section(NamedTuple):
    """One claim of the paper: what it says, what was done to test it, and what came out."""

    title: str
    """The heading."""
    says: str
    """What the paper claims."""
    did: str
    """What was run, with all settings that are needed to repeat it."""
    rows: Sequence[tuple[str, str]]
    """The table: pairs of a quantity and what was measured."""
    verdict: str
    """What is true of the claim, in a few sentences."""
    facts: Sequence[Fact]
    """The numbers for theory.csv and the figure."""


# ---- curves ----


def binned(
    k: Array,
    value: Array,
    start: float = 1.0,
    bins: int = 40,
) -> tuple[Array, Array]:
    """Average a curve over bins of equal width in log k.

    On a logarithmic axis most rounds lie close together at the right. Bins give every part of the
    axis the same weight, and smooth the noise of mini-batches.

    Args:
        k: The rounds of the curve, rising.
        value: Its values in these rounds.
        start: Rounds before this one are left out.
        bins: The number of bins between `start` and the last round.

    Returns:
        The mean k and the mean value of every bin that holds a round.
    """
    # A bin does not hold its right end. The last one must hold the last round.
    edges = np.geomspace(start, k[-1] * 1.0001, bins + 1)
    centres = []
    means = []
    for left, right in pairwise(edges):
        inside = (k >= left) & (k < right)
        if inside.any():
            centres.append(k[inside].mean())
            means.append(value[inside].mean())
    return np.array(centres), np.array(means)


def slope(k: Array, value: Array) -> float:
    """The slope of log value on log k over the last decade: -1 for a curve that falls like 1/k.

    The values must be positive.

    >>> k = np.arange(1.0, 1001.0)
    >>> round(slope(k, 1 / k), 2)
    -1.0
    """
    x, y = binned(k, value, k[-1] / 10, 20)
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def curve(
    claim: str,
    quantity: str,
    seed: int | None,
    k: Array,
    value: Array,
) -> list[Fact]:
    """A curve as facts, one for each of up to 40 bins. theory.csv stays small this way."""
    points = zip(*binned(k, value), strict=True)
    return [Fact(claim, quantity, seed, float(x), float(y)) for x, y in points]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean ± sample deviation over seeds as text; a dash where there is no value.

    >>> spread([1.0, 3.0]), spread([1.0]), spread([])
    ('2.00 ± 1.41', '1.00', '–')
    """
    if not values:
        return "–"
    mean = f"{np.mean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {np.std(values, ddof=1):.{digits}f}"
