"""FedSSO, and every algorithm of the registry, on Flower (the extra `flower`).

- `FedSSO` is a strategy for the clients that you have: they train as for FedAvg.
- `PhasedStrategy` runs any algorithm of the registry, with clients that `client_app` makes.
- `discreet` keeps a client's errors from telling the server anything about its rows.
- `Clip` bounds the influence of one client.

A regression over hospitals is in `fedsso.flower.regression`. What needs torch is loaded when it
is first asked for: a hospital that answers a regression must not wait for torch.

>>> from fedsso.flower import FedSSO
>>> strategy = FedSSO(eta_l=0.01, local_steps=5, fraction_train=1.0)
>>> strategy.rounds_left(100)
100
"""

from typing import TYPE_CHECKING

try:
    import flwr as _flwr  # noqa: F401
except ImportError as error:
    remedy = "install fedsso with its extra, in a checkout `pip install '.[flower]'`"
    raise ImportError(f"fedsso.flower needs Flower: {remedy}") from error

from .discreet import discreet

if TYPE_CHECKING:
    from .bounds import Clip
    from .client import client_app
    from .phased import PhasedStrategy
    from .strategy import FedSSO
else:
    _HOMES = {
        "Clip": "bounds",
        "FedSSO": "strategy",
        "PhasedStrategy": "phased",
        "client_app": "client",
    }

    def __getattr__(name: str) -> object:
        """A public name, from the module that holds it, or a module of this package."""
        from importlib import import_module
        from importlib.util import find_spec

        if name in _HOMES:
            module = import_module(f"{__name__}.{_HOMES[name]}")
            globals()[name] = getattr(module, name)
            return globals()[name]
        if find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Clip", "FedSSO", "PhasedStrategy", "client_app", "discreet"]
