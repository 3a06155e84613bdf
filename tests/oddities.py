"""Tables that are odd but not wrong, and some that are wrong: what every algorithm must bear, or a
federation refuse.

Plain functions without a test, so that others can use the tables as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Table = tuple[Array, Array, Array]
"""x [rows, features], y [rows], the client of each row."""

SCALES = (1e-30, 1e-3, 1e3, 1e30)
ROWS, FEATURES, CLIENTS = 24, 3, 3


def plain(rows: int = ROWS, features: int = FEATURES, clients: int = CLIENTS) -> Table:
    """Gaussian rows with a label that a linear model can learn."""
    draw = np.random.default_rng(5)
    x = draw.normal(size=(rows, features))
    return x, (x.sum(1) > 0).astype(np.int64), np.arange(rows) % clients


def oddities() -> dict[str, Table]:
    """Tables that every algorithm takes: it ends, or the run is marked as diverged."""
    x, y, who = plain()
    last = np.arange(FEATURES) == FEATURES - 1
    odd: dict[str, Table] = {
        "plain": (x, y, who),
        "a constant feature": (np.where(last, 7.0, x), y, who),
        "all features constant": (np.ones_like(x), y, who),
        "all features zero": (np.zeros_like(x), y, who),
        "one class per client": (x, who, who),
        "one class in all": (x, np.zeros_like(y), who),
        "one row per client": (x, y, np.arange(ROWS)),
        "one client of one row": (x, y, np.where(np.arange(ROWS) == 0, 1, 0)),
        "one feature": plain(features=1),
        "one client": plain(clients=1),
        "one row": plain(rows=1, clients=1),
        "duplicate rows": (np.repeat(x[:1], ROWS, 0), np.repeat(y[:1], ROWS), who),
        "duplicate rows of two labels": (np.repeat(x[:1], ROWS, 0), y, who),
        "more features than rows": plain(rows=6, features=12),
        "an outlier": (np.where((np.arange(ROWS) == 3)[:, None], 1e6 * x, x), y, who),
        "real targets": (x, x @ np.ones(FEATURES), who),
        "constant real targets": (x, np.full(ROWS, 3.5), who),
    }
    for scale in SCALES:
        odd[f"all features x {scale:g}"] = (x * scale, y, who)
        odd[f"one feature x {scale:g}"] = (np.where(last, scale * x, x), y, who)
        odd[f"real targets x {scale:g}"] = (x, scale * (x @ np.ones(FEATURES)), who)
    odd["all features x 1000, real targets"] = (1000 * x, x @ np.ones(FEATURES), who)
    return odd


def refused() -> dict[str, Table]:
    """Tables that a federation refuses; the number that is wrong stands in row 5, column 1."""
    x, y, who = plain()
    real = x @ np.ones(FEATURES)
    here = np.arange(ROWS) == 5
    place = here[:, None] & (np.arange(FEATURES) == 1)
    return {
        "NaN in x": (np.where(place, np.nan, x), y, who),
        "Inf in x": (np.where(place, np.inf, x), y, who),
        "-Inf in x": (np.where(place, -np.inf, x), y, who),
        "NaN in y": (x, np.where(here, np.nan, real), who),
        "Inf in y": (x, np.where(here, np.inf, real), who),
    }
