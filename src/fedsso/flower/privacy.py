"""Differential privacy on Flower, and where it must be: inside FedSSO, around the average.

Flower's strategies of differential privacy clip the clients' updates and add noise to their
average. The noise is scaled for that average. FedSSO's step can be many times longer than the
average, so noise that is added after the step would be too little. Inside FedSSO, the noise is
added before the step, and the guarantee holds whatever FedSSO makes of the noisy average.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from flwr.serverapp.strategy import Strategy

from ..errors import InputError
from .wire import Arrays


def chain(strategy: Strategy) -> Iterator[Strategy]:
    """A strategy and those that it wraps, from the outermost to the innermost.

    Flower's wrappers keep the strategy that they wrap in the attribute `strategy`.
    """
    one: object = strategy
    while isinstance(one, Strategy):
        yield one
        one = getattr(one, "strategy", None)


def is_private(kind: type) -> bool:
    """Whether a class is a strategy of differential privacy of Flower, or derived from one."""
    for cls in kind.__mro__:
        is_flowers = cls.__module__.startswith("flwr.")
        if is_flowers and cls.__name__.startswith(("DifferentialPrivacy", "DPFedAvg")):
            return True
    return False


def private(strategy: Strategy) -> Strategy | None:
    """The strategy of differential privacy among a strategy and those that it wraps.

    It is the outermost one if there are several, and None if there is none.
    """
    for one in chain(strategy):
        if is_private(type(one)):
            return one
    return None


def refuse_outside() -> None:
    """Raise InputError if a strategy of differential privacy wraps the one that calls this.

    Strategies do not know what wraps them, so the callers are looked up on the stack.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = type(frame.f_locals.get("self"))
        if is_private(caller):
            name = caller.__name__
            raise InputError(
                f"{name} around this strategy adds noise to the model after the server's step, "
                "which can be many times longer than the average of the clipped updates: too "
                "little noise for its guarantee. "
                f"Put it inside: fedsso.flower.FedSSO(..., inner={name}(FedAvg(...), ...))"
            )
        frame = frame.f_back


def check(inner: Strategy, arrays: Arrays) -> None:
    """Raise InputError for arrays that a private strategy would send unprotected.

    Flower's clipping leaves single numbers as they are, and fails on integers.
    """
    noisy = private(inner)
    if noisy is None:
        return
    names = [name for name, a in arrays.items() if a.ndim == 0 or a.dtype.kind != "f"]
    if names:
        raise InputError(
            f"{type(noisy).__name__} cannot clip {', '.join(names)}: single numbers without an "
            "axis and integers would travel unprotected; leave them out of the model (BatchNorm's "
            "num_batches_tracked: use GroupNorm)"
        )


def check_resumable(inner: Strategy) -> None:
    """Raise InputError if the strategy inside has learnt something that no checkpoint holds.

    A run that forgets the privacy it has spent would spend more than it promises.
    """
    noisy = private(inner)
    if noisy is None:
        return
    name = type(noisy).__name__
    if getattr(noisy, "accountant", None) is not None:
        lost = "the privacy spent so far"
    elif "Adaptive" in name:
        lost = "the adapted clipping norm"
    else:
        return
    raise InputError(
        f"{name} holds {lost}, which a checkpoint does not: this run cannot continue. Start again "
        "with another checkpoint_dir"
    )
