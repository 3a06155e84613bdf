"""Second-order federated optimisation.

>>> import fedsso
>>> fed = fedsso.load("digits", clients=5, partition="iid")
>>> run = fedsso.simulate(fed, model="mclr", algorithm=fedsso.FedSSO(alpha=0.01), rounds=20)
>>> run.final() > 0.9
True

What users call is in `public`, which is loaded when it is first asked for: torch takes seconds, and the command wants
to listen to Ctrl-C before.
"""

import os
from typing import TYPE_CHECKING

# Threads that wait by spinning slow a small job on a busy machine thirtyfold; this must be set before torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if TYPE_CHECKING:
    from .public import *  # noqa: F403
    from .public import __all__ as __all__
    from .public import __version__ as __version__
else:

    def __getattr__(name: str) -> object:
        """A public name, or a module of the package that these need."""
        from importlib import import_module

        public = import_module(".public", __name__)
        if hasattr(public, "__all__"):  # not while it is being loaded
            globals().update({each: getattr(public, each) for each in ("__all__", *public.__all__)})
        if name in globals():
            return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
