"""Differential privacy belongs inside FedSSO, around the average; there its noise is what it must be."""

from __future__ import annotations

import inspect

from flwr.serverapp.strategy import Strategy

from ..errors import InputError
from .wire import Arrays


def is_private(kind: type) -> bool:
    """Whether a class is one of Flower's strategies of differential privacy, or derived from one."""
    return any(cls.__name__.startswith("DifferentialPrivacy") for cls in kind.__mro__)


def refuse_outside() -> None:
    """Refuse to be wrapped by a strategy that adds noise to a model as if it were an average of clipped updates."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = type(frame.f_locals.get("self"))
        if is_private(caller):
            raise InputError(
                f"{caller.__name__} around this strategy adds noise to the model after the server's step, which can be "
                "many times longer than the average of the clipped updates: too little noise for its guarantee. "
                f"Put it inside: FedSSO(..., inner={caller.__name__}(FedAvg(...), ...))"
            )
        frame = frame.f_back


def check(inner: Strategy, arrays: Arrays) -> None:
    """Refuse arrays that Flower's clipping leaves as they are (single numbers) or fails on (integers)."""
    names = [name for name, a in arrays.items() if a.ndim == 0 or a.dtype.kind != "f"]
    if names and is_private(type(inner)):
        raise InputError(
            f"{type(inner).__name__} cannot clip {', '.join(names)}: single numbers without an axis and integers would "
            "travel unprotected; leave them out of the model (BatchNorm's num_batches_tracked: use GroupNorm)"
        )
