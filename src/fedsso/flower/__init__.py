"""FedSSO, and every algorithm of the registry, on Flower (`pip install "fedsso[flower]"`).

- `FedSSO` is a strategy for the clients that you have: they train as for FedAvg.
- `PhasedStrategy` runs any algorithm of the registry, with clients that `client_app` makes.
- `discreet` keeps a client's errors from telling the server anything about its rows.
- `Clip` bounds the influence of one client.

>>> from fedsso.flower import FedSSO
>>> strategy = FedSSO(eta_l=0.01, local_steps=5, fraction_train=1.0)
>>> strategy.rounds_left(100)
100
"""

try:
    import flwr as _flwr  # noqa: F401
except ImportError as error:
    raise ImportError('fedsso.flower needs Flower: pip install "fedsso[flower]"') from error

from .bounds import Clip
from .client import client_app
from .discreet import discreet
from .phased import PhasedStrategy
from .strategy import FedSSO

__all__ = ["Clip", "FedSSO", "PhasedStrategy", "client_app", "discreet"]
