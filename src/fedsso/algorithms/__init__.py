"""All algorithms: one line here makes one exist in the API, the command line, the sweeps, the tests and the docs."""

from __future__ import annotations

from typing import Any

from ..algorithm import Algorithm
from ..errors import unknown
from ..tree import build
from .fedavg import FedAvg as FedAvg
from .fedsgd import FedSGD as FedSGD
from .fedsso import FedSSO as FedSSO

ALGORITHMS: dict[str, type[Algorithm]] = {
    "fedsso": FedSSO,
    "fedavg": FedAvg,
    "fedsgd": FedSGD,
}


def name_of(algorithm: Algorithm) -> str:
    """The registry name of a record; a user's own class goes by its class name."""
    names = {cls: name for name, cls in ALGORITHMS.items()}
    return names.get(type(algorithm), type(algorithm).__name__.lower())


def make(name: str, values: dict[str, Any] | None = None) -> Algorithm:
    """A record by registry name; fields that are not given keep their defaults."""
    if name not in ALGORITHMS:
        raise unknown("algorithm", name, ALGORITHMS)
    return build(ALGORITHMS[name], values or {})
