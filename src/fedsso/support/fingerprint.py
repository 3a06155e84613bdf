"""What a user's object computes, as text: the same in another process, another one after a change.

Runs are told apart by it. Code is compared as Python's bytecode; torch's own goes by its name, so
that a newer torch does not make another run. What lies behind a global name of a function is not
followed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))


def describe(thing: Any, above: tuple[int, ...] = ()) -> str:
    """A text of the object's values and code; `above` holds what it is part of, as a function may
    hold itself."""
    if isinstance(thing, PLAIN):
        return repr(thing)
    if id(thing) in above:
        return "itself"
    if isinstance(thing, Tensor | np.ndarray | np.generic):
        return _numbers(thing)
    inside = (*above, id(thing))
    if isinstance(thing, dict):
        return _joined(f"{k!r}: {describe(v, inside)}" for k, v in thing.items())
    if isinstance(thing, list | tuple):
        return _joined(describe(v, inside) for v in thing)
    if isinstance(thing, set | frozenset):
        return _joined(sorted(describe(v, inside) for v in thing))
    return f"{getattr(thing, '__qualname__', type(thing).__qualname__)}{describe(_parts(thing), inside)}"


def _joined(texts: Iterable[str]) -> str:
    return f"({', '.join(texts)})"


def _numbers(array: Any) -> str:
    """A tensor or an array of numpy."""
    free = getattr(array, "requires_grad", False)
    values = array.detach().cpu().double().numpy() if isinstance(array, Tensor) else array
    return (
        f"{array.dtype} {tuple(array.shape)} {free} {hashlib.sha256(values.tobytes()).hexdigest()}"
    )


def _parts(thing: Any) -> Any:
    """What an object consists of."""
    if isinstance(thing, CodeType):
        return thing.co_code, thing.co_consts, thing.co_names
    if isinstance(thing, CellType):
        return _held(thing)
    if _is_torch(thing) or isinstance(thing, BuiltinFunctionType | type):
        return ()
    if isinstance(thing, FunctionType):
        return thing.__code__, thing.__defaults__, thing.__kwdefaults__, thing.__closure__
    if isinstance(thing, MethodType):
        return thing.__func__, thing.__self__
    if isinstance(thing, partial):
        return thing.func, thing.args, thing.keywords
    return _module(thing) if isinstance(thing, nn.Module) else _object(thing)


def _held(cell: CellType) -> Any:
    """What a function closes over; a list that it fills as it runs does not make it another
    function."""
    try:
        held = cell.cell_contents
    except ValueError:  # not yet assigned
        return ()
    return () if isinstance(held, list | dict | set) else (held,)


def _module(module: nn.Module) -> Any:
    """Architecture, parameters (and which are trained), buffers, settings, and the code of own
    forward functions."""
    values = [*module.named_parameters(), *module.named_buffers()]
    return repr(module), values, [(name, _object(m)) for name, m in module.named_modules()]


def _object(thing: Any) -> Any:
    """Public attributes and what a call of the object runs; a module's mode is the engine's affair."""
    held = getattr(thing, "__dict__", {})
    public = {k: v for k, v in held.items() if not k.startswith("_") and k != "training"}
    methods = (getattr(type(thing), name, None) for name in ("__call__", "forward"))
    return public, [m for m in methods if isinstance(m, FunctionType)]


def _is_torch(thing: Any) -> bool:
    return isinstance(thing, FunctionType) and thing.__module__.partition(".")[0] == "torch"
