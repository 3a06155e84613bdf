"""Grids of hyper-parameters: the paper's twelve client steps and seven server steps, and each
algorithm's own axes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..algorithm.records import fields_of, to_dict
from ..algorithms import ALGORITHMS, make
from ..errors import InputError, unknown

if TYPE_CHECKING:
    from ..algorithm import Algorithm

ALPHA = (0.0001, 0.0003, 0.0007, 0.001, 0.003, 0.007, 0.01, 0.03, 0.07, 0.1, 0.3, 0.7)
ETA = (0.01, 0.03, 0.07, 0.1, 0.3, 0.7, 1.0)
STRENGTH = (
    0.001,
    0.01,
    0.1,
    1.0,
)  # of a proximal term, or the strong convexity that a method is told
DAMPING = (0.1, 0.3, 1.0)  # of Newton's step
BOTH = ("fedsso", "fedadagrad", "fedadam", "fedyogi", "fedavgm")  # tuned in both steps
OWN: dict[str, dict[str, tuple[float, ...]]] = {
    "fedac": {"alpha": ALPHA, "mu": STRENGTH},
    "fedprox": {"alpha": ALPHA, "mu": STRENGTH},
    "fednl": {"eta": DAMPING},
}


def axes(name: str) -> dict[str, tuple[float, ...]]:
    """The hyper-parameters of an algorithm that are tuned, with the values that are tried."""
    if name not in ALGORITHMS:
        raise unknown("algorithm", name, ALGORITHMS)
    if name in OWN:
        return dict(OWN[name])
    tuned = {"alpha": ALPHA, "eta": ETA} if name in BOTH else {"alpha": ALPHA}
    return {k: v for k, v in tuned.items() if any(f.name == k for f in fields_of(ALGORITHMS[name]))}


def grid(name: str, values: Mapping[str, Any] | None = None) -> list[Algorithm]:
    """All records of an algorithm's grid, which is what `fedsso.sweep` tries for a name.

    Args:
        name: The algorithm's name in the registry.
        values: A list replaces or adds an axis of the grid; anything else is a fixed value.

    >>> len(grid("fedsso")), len(grid("fedavg", {"alpha": [0.1, 0.3]}))
    (84, 2)
    """
    spread: dict[str, Any] = {**axes(name), **(values or {})}
    for key, value in spread.items():
        if isinstance(value, list | tuple) and len(set(value)) < max(1, len(value)):
            raise InputError(
                f"{key} must list different values, at least one; got {key}={list(value)}"
            )
    lists = {k: v for k, v in spread.items() if isinstance(v, list | tuple)}
    fixed = {k: v for k, v in spread.items() if k not in lists}
    return [
        make(name, {**dict(zip(lists, picked, strict=True)), **fixed})
        for picked in itertools.product(*lists.values())
    ]


def tried(records: Sequence[Algorithm]) -> dict[str, list[Any]]:
    """The values that each field has in a grid, in order.

    >>> tried(grid("fedavg", {"alpha": [0.1, 0.3]}))
    {'alpha': [0.1, 0.3], 'eta': [1.0]}
    """
    values: dict[str, list[Any]] = {}
    for record in records:
        for name, value in to_dict(record).items():
            if value not in values.setdefault(name, []):
                values[name].append(value)
    return values
