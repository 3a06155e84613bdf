"""Differential privacy belongs inside FedSSO, around the average; there its noise is what it must
be."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from flwr.serverapp.strategy import Strategy

from ..errors import InputError
from .wire import Arrays


def chain(strategy: Strategy) -> Iterator[Strategy]:
    """A strategy and those that it wraps, from outside to inside."""
    yield strategy
    while isinstance(strategy := getattr(strategy, "strategy", None), Strategy):  # type: ignore[assignment]
        yield strategy


def is_private(kind: type) -> bool:
    """Whether a class is one of Flower's strategies of differential privacy, or derived from one."""
    known = (cls for cls in kind.__mro__ if cls.__module__.startswith("flwr."))
    return any(cls.__name__.startswith(("DifferentialPrivacy", "DPFedAvg")) for cls in known)


def private(strategy: Strategy) -> Strategy | None:
    """The strategy of differential privacy among those inside, if there is one."""
    return next((one for one in chain(strategy) if is_private(type(one))), None)


def refuse_outside() -> None:
    """Refuse to be wrapped by a strategy that adds noise to a model as if it were an average of
    clipped updates."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = type(frame.f_locals.get("self"))
        if is_private(caller):
            raise InputError(
                f"{caller.__name__} around this strategy adds noise to the model after the "
                f"server's step, which can be "
                "many times longer than the average of the clipped updates: too little noise for "
                "its guarantee. "
                f"Put it inside: fedsso.flower.FedSSO(..., inner={caller.__name__}(FedAvg(...), "
                f"...))"
            )
        frame = frame.f_back


def check(inner: Strategy, arrays: Arrays) -> None:
    """Refuse arrays that Flower's clipping leaves as they are (single numbers) or fails on
    (integers)."""
    names = [name for name, a in arrays.items() if a.ndim == 0 or a.dtype.kind != "f"]
    noisy = private(inner)
    if names and noisy is not None:
        raise InputError(
            f"{type(noisy).__name__} cannot clip {', '.join(names)}: single numbers without an "
            f"axis and integers would "
            "travel unprotected; leave them out of the model (BatchNorm's num_batches_tracked: use "
            "GroupNorm)"
        )


def check_resumable(inner: Strategy) -> None:
    """Refuse to go on where the strategy inside has learnt what no checkpoint holds."""
    noisy = private(inner)
    if noisy is None:
        return
    spent = "the privacy spent so far" if getattr(noisy, "accountant", None) is not None else ""
    adapted = "the adapted clipping norm" if "Adaptive" in type(noisy).__name__ else ""
    if spent or adapted:
        raise InputError(
            f"{type(noisy).__name__} holds {spent or adapted}, which a checkpoint does not: this "
            f"run cannot go on. "
            "Start again with another checkpoint_dir"
        )
