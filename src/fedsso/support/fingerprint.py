"""What a user's object computes, as text.

A run is repeated or resumed only with the same model, loss and data. To compare them, an object is
described by a text that is the same in another process, and another one after a change.

Functions are compared by their bytecode. Functions of torch are compared by their names, so that a
newer version of torch does not make another run of it. What a function finds behind a global name
is not followed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor, nn

PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(...),
)
"""Types whose `repr` says everything."""


def describe(thing: Any, above: tuple[int, ...] = ()) -> str:
    """Describe an object's values and code as text.

    Args:
        thing: Anything: a model, a loss, an array, a dictionary of settings.
        above: The identities of the objects that it is a part of. A function may contain itself,
            and is then described as "itself".

    >>> describe({"lr": 0.1, "sizes": [3, 4]})
    "('lr': 0.1, 'sizes': (3, 4))"
    """
    if isinstance(thing, PLAIN):
        return repr(thing)
    if id(thing) in above:
        return "itself"
    if isinstance(thing, Tensor | np.ndarray | np.generic):
        return _numbers(thing)
    inside = (*above, id(thing))
    if isinstance(thing, dict):
        return _joined(f"{name!r}: {describe(value, inside)}" for name, value in thing.items())
    if isinstance(thing, list | tuple):
        return _joined(describe(item, inside) for item in thing)
    # The order of a set differs between processes.
    if isinstance(thing, set | frozenset):
        return _joined(sorted(describe(item, inside) for item in thing))
    name = getattr(thing, "__qualname__", type(thing).__qualname__)
    parts = describe(_parts(thing), inside)
    return f"{name}{parts}"


def _joined(texts: Iterable[str]) -> str:
    """Several texts in brackets."""
    return f"({', '.join(texts)})"


def _numbers(array: Any) -> str:
    """A tensor or a numpy array: its type, its shape, whether it is trained, and a checksum."""
    is_trained = getattr(array, "requires_grad", False)
    values = array
    if isinstance(array, Tensor):
        values = array.detach().cpu().double().numpy()
    shape = tuple(array.shape)
    checksum = hashlib.sha256(values.tobytes())
    return f"{array.dtype} {shape} {is_trained} {checksum.hexdigest()}"


def _parts(thing: Any) -> Any:
    """What an object consists of: the values that decide what it computes.

    Builtin functions, classes and functions of torch are known by their names alone.
    """
    if isinstance(thing, CodeType):
        return thing.co_code, thing.co_consts, thing.co_names
    if isinstance(thing, CellType):
        return _held(thing)
    if _is_torch(thing) or isinstance(thing, BuiltinFunctionType | type):
        return ()
    if isinstance(thing, FunctionType):
        return (
            thing.__code__,
            thing.__defaults__,
            thing.__kwdefaults__,
            thing.__closure__,
        )
    if isinstance(thing, MethodType):
        return thing.__func__, thing.__self__
    if isinstance(thing, partial):
        return thing.func, thing.args, thing.keywords
    if isinstance(thing, nn.Module):
        return _module(thing)
    return _object(thing)


def _held(cell: CellType) -> Any:
    """What a function closes over.

    A list, dictionary or set does not count: a function that fills one as it runs stays the same
    function.
    """
    try:
        held = cell.cell_contents
    except ValueError:  # not yet assigned
        return ()
    if isinstance(held, list | dict | set):
        return ()
    return (held,)


def _module(module: nn.Module) -> Any:
    """The architecture of a module, its parameters and buffers, its settings and its own code."""
    values = [*module.named_parameters(), *module.named_buffers()]
    objects = []
    for name, one in module.named_modules():
        objects.append((name, _object(one)))
    return repr(module), values, objects


def _object(thing: Any) -> Any:
    """The public attributes of an object, and the code that a call of it runs.

    Whether a module is in training mode does not count. The engine decides that.
    """
    held = getattr(thing, "__dict__", {})
    public = {}
    for name, value in held.items():
        if not name.startswith("_") and name != "training":
            public[name] = value
    methods = []
    for name in ("__call__", "forward"):
        method = getattr(type(thing), name, None)
        if isinstance(method, FunctionType):
            methods.append(method)
    return public, methods


def _is_torch(thing: Any) -> bool:
    """Whether something is a function of torch."""
    if not isinstance(thing, FunctionType):
        return False
    package = thing.__module__.partition(".")[0]
    return package == "torch"
