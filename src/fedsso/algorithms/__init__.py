"""All algorithms.

A line in ALGORITHMS makes an algorithm known to the command line, the sweeps, the tests and the
documentation. Its name in __all__ puts it beside `fedsso.FedSSO`.

`first_order` and `second_order` hold one paper in each file. `fedsso.py` is the paper that this
package is about; `trust_region.py`, `cautious.py`, `client_step.py`, `memory.py` and `layers.py`
are parts of it that go beyond the paper. `shapes.py` reads the shapes of weights, `hessians.py` is
what several papers on learnt Hessians share.

Every file is built alike. Its docstring cites the paper, lists the symbols beside the paper's
own, and says what a round does and where the method fails. Below stand the server's state, the
messages, and the record: its fields are the hyper-parameters, its methods the formulas. Names of
variables are those of the table of symbols.
"""

from __future__ import annotations

from typing import Any

from ..algorithm import Algorithm, build
from ..errors import unknown
from .fedsso import FedSSO as FedSSO
from .first_order.diloco import DiLoCo as DiLoCo
from .first_order.fedac import FedAC as FedAC
from .first_order.fedacg import FedACG as FedACG
from .first_order.fedavg import FedAvg as FedAvg
from .first_order.fedexp import FedExP as FedExP
from .first_order.fednova import FedNova as FedNova
from .first_order.fedopt import FedAdaGrad as FedAdaGrad
from .first_order.fedopt import FedAdam as FedAdam
from .first_order.fedopt import FedAvgM as FedAvgM
from .first_order.fedopt import FedYogi as FedYogi
from .first_order.fedper import FedPer as FedPer
from .first_order.fedprox import FedProx as FedProx
from .first_order.fedsgd import FedSGD as FedSGD
from .first_order.fedvarp import FedVARP as FedVARP
from .first_order.harmofl import HarmoFL as HarmoFL
from .first_order.ldsgd import LDSGD as LDSGD
from .first_order.mifa import MIFA as MIFA
from .first_order.mocha import MOCHA as MOCHA
from .first_order.scaffold import SCAFFOLD as SCAFFOLD
from .first_order.serverlion import ServerLion as ServerLion
from .first_order.servermuon import ServerMuon as ServerMuon
from .first_order.stem import STEM as STEM
from .second_order.aide import AIDE as AIDE
from .second_order.anderson import Anderson as Anderson
from .second_order.basis_learn import BL1 as BL1
from .second_order.basis_learn import BL2 as BL2
from .second_order.basis_learn import BL3 as BL3
from .second_order.dane import DANE as DANE
from .second_order.disco import DiSCO as DiSCO
from .second_order.done import DONE as DONE
from .second_order.feddane import FedDANE as FedDANE
from .second_order.fednew import FedNew as FedNew
from .second_order.fednl import FedNL as FedNL
from .second_order.fednl import FedNLLS as FedNLLS
from .second_order.fednl import FedNLPP as FedNLPP
from .second_order.fedpm import FedPM as FedPM
from .second_order.fedsophia import FedSophia as FedSophia
from .second_order.giant import GIANT as GIANT
from .second_order.localnewton import LocalNewton as LocalNewton
from .second_order.newton_learn import NL1 as NL1
from .second_order.newton_learn import NL2 as NL2

# Names as the command line, settings files and kept runs write them: with another name for the
# same algorithm, runs that were kept would no longer be found.
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
    "fedexp": FedExP,
    "fedacg": FedACG,
    "diloco": DiLoCo,
    "serverlion": ServerLion,
    "servermuon": ServerMuon,
    "fedvarp": FedVARP,
    "mifa": MIFA,
    "aide": AIDE,
    "disco": DiSCO,
    "mocha": MOCHA,
    "harmofl": HarmoFL,
    "nl1": NL1,
    "nl2": NL2,
    "bl1": BL1,
    "bl2": BL2,
    "bl3": BL3,
}
__all__ = [
    "AIDE",
    "BL1",
    "BL2",
    "BL3",
    "DANE",
    "DONE",
    "GIANT",
    "LDSGD",
    "MIFA",
    "MOCHA",
    "NL1",
    "NL2",
    "SCAFFOLD",
    "STEM",
    "Anderson",
    "DiLoCo",
    "DiSCO",
    "FedAC",
    "FedACG",
    "FedAdaGrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedDANE",
    "FedExP",
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
    "FedVARP",
    "FedYogi",
    "HarmoFL",
    "LocalNewton",
    "ServerLion",
    "ServerMuon",
]


def name_of(algorithm: Algorithm) -> str:
    """The registry name of a record.

    A user's own class goes by its class name in small letters, with "own-" before it where that
    name is taken.

    >>> name_of(FedNLLS())
    'fednl-ls'
    """
    names = {cls: name for name, cls in ALGORITHMS.items()}
    kind = type(algorithm)
    if kind in names:
        return names[kind]
    own = kind.__name__.lower()
    return f"own-{own}" if own in ALGORITHMS else own


def make(name: str, values: dict[str, Any] | None = None) -> Algorithm:
    """A record by registry name; fields that are not given keep their defaults.

    Args:
        name: A key of ALGORITHMS.
        values: Fields of the record by name.

    Raises:
        InputError: The name or a field is not known, or a value is not allowed.

    >>> make("fedavg", {"alpha": 0.1}).alpha
    0.1
    """
    if name not in ALGORITHMS:
        raise unknown("algorithm", name, ALGORITHMS)
    return build(ALGORITHMS[name], values or {})
