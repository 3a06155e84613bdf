"""Second-order federated optimisation.

>>> import fedsso
>>> fed = fedsso.load("digits", clients=5, partition="iid")
>>> run = fedsso.simulate(fed, model="mclr", algorithm=fedsso.FedSSO(alpha=0.01), rounds=20)
>>> run.final() > 0.9
True

What users call is in `public`, which is loaded when it is first asked for: torch takes seconds, and
the command wants to listen to Ctrl-C before.
"""

import os
from typing import TYPE_CHECKING

# Threads that wait by spinning slow a small job on a busy machine thirtyfold; this must be set
# before torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if TYPE_CHECKING:
    from .algorithms import *  # noqa: F403
    from .public import *  # noqa: F403
    from .public import __all__ as __all__
    from .public import __version__ as __version__
else:

    def __getattr__(name: str) -> object:
        """A module of the package, or a public name."""
        from importlib import import_module
        from importlib.util import find_spec

        if find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")
        public = import_module(f"{__name__}.public")
        if name != "__all__" and name not in public.__all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = getattr(public, name)
        return globals()[name]

    def __dir__() -> list[str]:
        """The public names, for whoever looks for them."""
        from importlib import import_module

        return sorted({*globals(), *import_module(f"{__name__}.public").__all__})
