"""All algorithms.

A line in ALGORITHMS makes one exist in the command line, the sweeps, the tests and the docs; its name in __all__ puts
it beside `fedsso.FedSSO`.
"""

from __future__ import annotations

from typing import Any

from ..algorithm import Algorithm
from ..errors import unknown
from ..tree import build
from .anderson import Anderson as Anderson
from .dane import DANE as DANE
from .done import DONE as DONE
from .fedac import FedAC as FedAC
from .fedavg import FedAvg as FedAvg
from .feddane import FedDANE as FedDANE
from .fednew import FedNew as FedNew
from .fednl import FedNL as FedNL
from .fednl import FedNLLS as FedNLLS
from .fednl import FedNLPP as FedNLPP
from .fednova import FedNova as FedNova
from .fedopt import FedAdaGrad as FedAdaGrad
from .fedopt import FedAdam as FedAdam
from .fedopt import FedAvgM as FedAvgM
from .fedopt import FedYogi as FedYogi
from .fedper import FedPer as FedPer
from .fedpm import FedPM as FedPM
from .fedprox import FedProx as FedProx
from .fedsgd import FedSGD as FedSGD
from .fedsophia import FedSophia as FedSophia
from .fedsso import FedSSO as FedSSO
from .giant import GIANT as GIANT
from .ldsgd import LDSGD as LDSGD
from .localnewton import LocalNewton as LocalNewton
from .scaffold import SCAFFOLD as SCAFFOLD
from .stem import STEM as STEM

ALGORITHMS: dict[str, type[Algorithm]] = {
    "fedsso": FedSSO,
    "fedavg": FedAvg,
    "fedsgd": FedSGD,
    "fedac": FedAC,
    "fedadagrad": FedAdaGrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedavgm": FedAvgM,
    "scaffold": SCAFFOLD,
    "feddane": FedDANE,
    "fednl": FedNL,
    "fednl-ls": FedNLLS,
    "fednl-pp": FedNLPP,
    "fedprox": FedProx,
    "fednova": FedNova,
    "dane": DANE,
    "giant": GIANT,
    "done": DONE,
    "localnewton": LocalNewton,
    "stem": STEM,
    "ldsgd": LDSGD,
    "fedper": FedPer,
    "fednew": FedNew,
    "fedsophia": FedSophia,
    "anderson": Anderson,
    "fedpm": FedPM,
}
__all__ = [
    "DANE",
    "DONE",
    "GIANT",
    "LDSGD",
    "SCAFFOLD",
    "STEM",
    "Anderson",
    "FedAC",
    "FedAdaGrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedDANE",
    "FedNL",
    "FedNLLS",
    "FedNLPP",
    "FedNew",
    "FedNova",
    "FedPM",
    "FedPer",
    "FedProx",
    "FedSGD",
    "FedSSO",
    "FedSophia",
    "FedYogi",
    "LocalNewton",
]


def name_of(algorithm: Algorithm) -> str:
    """The registry name of a record; a user's own class goes by its class name, unless that is taken."""
    names = {cls: name for name, cls in ALGORITHMS.items()}
    own = type(algorithm).__name__.lower()
    return names.get(type(algorithm), f"own-{own}" if own in ALGORITHMS else own)


def make(name: str, values: dict[str, Any] | None = None) -> Algorithm:
    """A record by registry name; fields that are not given keep their defaults."""
    if name not in ALGORITHMS:
        raise unknown("algorithm", name, ALGORITHMS)
    return build(ALGORITHMS[name], values or {})
