"""Grids of hyper-parameters: the settings that a sweep tries for each algorithm.

A grid is a list of records, one for each combination of values. Left to itself, an algorithm is
tuned over the paper's twelve client steps (`ALPHA`). Those with a server step that matters are also
tuned over the paper's seven server steps (`ETA`), and a few have axes of their own (`OWN`). Any
field of an algorithm can be made an axis, or fixed, by `grid`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..algorithm.records import fields_of, to_dict
from ..algorithms import ALGORITHMS, make
from ..errors import InputError, unknown

if TYPE_CHECKING:
    from ..algorithm import Algorithm

# The paper's client steps α, and below them its server steps η.
ALPHA = (0.0001, 0.0003, 0.0007, 0.001, 0.003, 0.007, 0.01, 0.03, 0.07, 0.1, 0.3, 0.7)
ETA = (0.01, 0.03, 0.07, 0.1, 0.3, 0.7, 1.0)
# The strength μ of a proximal term, or the strong convexity that a method is told.
STRENGTH = (
    0.001,
    0.01,
    0.1,
    1.0,
)
# The proximal strength τ of AIDE, to be compared with how unlike the clients' Hessians are.
PROXIMAL = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
# Values of η that damp Newton's step; 1 takes it whole.
DAMPING = (0.1, 0.3, 1.0)
# Momenta β: with 0 a step is as long as FedAvg's, with 0.95 up to twenty times as long.
MOMENTUM = (0.0, 0.3, 0.5, 0.7, 0.85, 0.95)
# The ε of FedExP, to be compared with the squared length of an update.
EPSILON = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1)
# Server steps of methods whose step has a length of its own, whatever the clients' updates.
SIGNS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
ORTHOGONAL = (0.006, 0.02, 0.06, 0.2, 0.6, 2.0)
# Algorithms that are tuned in both steps. For the others η stays at its default.
BOTH = ("fedsso", "fedadagrad", "fedadam", "fedyogi", "fedavgm", "diloco")
# Algorithms with axes of their own, in place of α and η.
OWN: dict[str, dict[str, tuple[float, ...]]] = {
    "fedac": {"alpha": ALPHA, "mu": STRENGTH},
    "fedprox": {"alpha": ALPHA, "mu": STRENGTH},
    "fednl": {"eta": DAMPING},
    "aide": {"tau": PROXIMAL},
    "fedexp": {"alpha": ALPHA, "eps": EPSILON},
    "fedacg": {"alpha": ALPHA, "beta": MOMENTUM},
    "serverlion": {"alpha": ALPHA, "eta": SIGNS},
    "servermuon": {"alpha": ALPHA, "eta": ORTHOGONAL},
}


def axes(name: str) -> dict[str, tuple[float, ...]]:
    """The hyper-parameters of an algorithm that are tuned, with the values that are tried.

    Args:
        name: The algorithm's name in the registry.

    Returns:
        The values of each axis, by the name of the field. An algorithm without a step size, such
        as one that solves for its step, has no axes: its grid is one record.

    Raises:
        InputError: No algorithm has this name.

    >>> axes("fedprox")["mu"]
    (0.001, 0.01, 0.1, 1.0)
    """
    if not isinstance(name, str):
        raise InputError(f"a grid is that of one algorithm: give its name, got {name!r}")
    if name not in ALGORITHMS:
        raise unknown("algorithm", name, ALGORITHMS)
    if name in OWN:
        return dict(OWN[name])
    tuned = {"alpha": ALPHA, "eta": ETA} if name in BOTH else {"alpha": ALPHA}
    return {k: v for k, v in tuned.items() if any(f.name == k for f in fields_of(ALGORITHMS[name]))}


def grid(name: str, values: Mapping[str, Any] | None = None) -> list[Algorithm]:
    """All records of an algorithm's grid, which is what `fedsso.sweep` tries for a name.

    Give the list to `fedsso.sweep` to try other values than the paper's, or to fix a field. The
    last axis varies fastest.

    Args:
        name: The algorithm's name in the registry.
        values: A list replaces or adds an axis of the grid; anything else is a fixed value. Keys
            are fields of the algorithm, which `fedsso algorithms` lists.

    Returns:
        One record for each combination of values.

    Raises:
        InputError: The name or a field is unknown, a value is out of its range, or a list is
            empty or holds a value twice.

    >>> len(grid("fedsso")), len(grid("fedavg", {"alpha": [0.1, 0.3]}))
    (84, 2)
    >>> grid("fedavg", {"alpha": 0.1, "eta": [0.5, 1.0]})
    [FedAvg(alpha=0.1, eta=0.5), FedAvg(alpha=0.1, eta=1.0)]
    """
    if not isinstance(values, Mapping | None):
        raise InputError(f'values must be a dictionary such as {{"alpha": [0.1]}}, got {values!r}')
    spread: dict[str, Any] = {**axes(name), **(values or {})}
    for key, value in spread.items():
        if isinstance(value, list | tuple) and len(set(value)) < max(1, len(value)):
            raise InputError(
                f"{key} must list different values, at least one; got {key}={list(value)}"
            )
    lists = {k: v for k, v in spread.items() if isinstance(v, list | tuple)}
    # What is no list is the same in every record: a number, a word, or a schedule.
    fixed = {k: v for k, v in spread.items() if k not in lists}
    return [
        make(name, {**dict(zip(lists, picked, strict=True)), **fixed})
        for picked in itertools.product(*lists.values())
    ]


def tried(records: Sequence[Algorithm]) -> dict[str, list[Any]]:
    """The values that each field has in a grid, in order.

    It is the way back from a list of records to the axes that made it.

    Args:
        records: Records of one algorithm.

    Returns:
        The different values of every field, in the order in which they first occur. A field with
        one value was fixed.

    >>> tried(grid("fedavg", {"alpha": [0.1, 0.3]}))
    {'alpha': [0.1, 0.3], 'eta': [1.0]}
    """
    values: dict[str, list[Any]] = {}
    for record in records:
        for name, value in to_dict(record).items():
            if value not in values.setdefault(name, []):
                values[name].append(value)
    return values
