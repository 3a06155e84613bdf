"""Records of hyper-parameters, and how several records become one sweep.

A *record* is a frozen dataclass made by ``@hyper``, such as ``FedAvg(alpha=0.1)``. Its fields are
of two kinds.

Swept fields may differ between the trials of a sweep: a step size, a weight. Records that differ in
these alone are stacked into one record whose swept fields are tensors [trials, 1], and all trials
run at once. Static fields are the same in all trials that run at once: a name, a window length.
Trials that differ there are run one after the other.

A field is swept if its type admits a tensor, as ``Scalar`` and ``Step`` do. Its author can also say
so: ``param(default=0.1, doc="...", swept=True)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache, wraps
from inspect import signature as parameters_of
from types import UnionType
from typing import Any, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from ..errors import InputError, unknown

R = TypeVar("R")
CLIENT_STEP = ("lr", "learning_rate", "eta_l", "local_lr", "client_lr", "step")
SERVER_STEP = ("server_lr", "global_lr")
OTHER_NAMES = {  # what papers and frameworks call a field -> what it may be called here
    **dict.fromkeys(CLIENT_STEP, ("alpha",)),
    **dict.fromkeys(SERVER_STEP, ("eta",)),
    "momentum": ("beta", "beta1"),
}


# ---- making a record ----


def param(
    *,
    default: Any,
    doc: str,
    swept: bool | None = None,
) -> Any:
    """A record's field, with its default and one line of documentation.

    Args:
        default: The value where the user gives none.
        doc: What it is, for help texts and pages. It should name the paper's symbol.
        swept: Whether the trials of a sweep may differ in this field; None: the field's type
            decides.
    """
    return field(default=default, metadata={"doc": doc, "swept": swept})


@dataclass_transform(frozen_default=True, field_specifiers=(field, param))
def hyper(cls: type[R]) -> type[R]:
    """Make a class a record: a frozen dataclass whose swept fields can be stacked over trials.

    A name that is not a field is refused by an error that tells the right one, also for names of
    other libraries (lr for alpha). Types of fields are read when a sweep first asks for them.

    >>> @hyper
    ... class Halves:
    ...     alpha: float | Tensor = param(default=0.1, doc="client step")
    ...     window: int = param(default=5, doc="rounds that are kept")
    >>> swept(Halves(alpha=0.5))
    ['alpha']
    """
    has_own = "__init__" in vars(cls)
    record = dataclass(frozen=True)(cls)
    if not has_own:
        record.__init__ = _checked(record.__init__)  # type: ignore[method-assign]
    return record


def _checked(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor that refuses unknown names before it does its work."""
    _, *names = parameters_of(init).parameters

    @wraps(init)
    def __init__(
        self: Any,
        *args: Any,
        **values: Any,
    ) -> None:
        _check_names(type(self), values, names)
        init(self, *args, **values)

    return __init__


def _check_names(
    cls: type,
    given: Iterable[str],
    known: Sequence[str],
) -> None:
    """Raise InputError for a name that the record does not have."""
    for name in given:
        if name not in known:
            raise _wrong_name(f"field of {cls.__name__}", name, known)


def _wrong_name(
    kind: str,
    name: str,
    known: Sequence[str],
) -> InputError:
    """The error for a wrong name: it tells the name used here, or else the nearest one."""
    for other in OTHER_NAMES.get(name, ()):
        if other in known:
            hint = f"here it is called {other!r}"
            listed = ", ".join(sorted(known))
            return InputError(f"unknown {kind} {name!r}; {hint}. Known: {listed}.")
    return unknown(kind, name, known)


def build(cls: type[R], values: dict[str, Any]) -> R:
    """A record from keyword values, with a clear error for a name it does not have.

    Raises:
        InputError: A name is not a field, or the record refuses a value.
    """
    _check_names(cls, values, [f.name for f in fields_of(cls)])
    return cls(**values)


# ---- looking at a record ----


def fields_of(cls: Any) -> tuple[Field[Any], ...]:
    """The fields of a record or of its class."""
    return fields(cls)


def to_dict(record: Any) -> dict[str, Any]:
    """A record's fields as plain values; nested records (schedules) become nested dictionaries.

    This is what settings files and identities of runs are made of.
    """
    values = {}
    for f in fields(record):
        value = getattr(record, f.name)
        values[f.name] = to_dict(value) if is_dataclass(value) else value
    return values


def changed(record: Any) -> dict[str, Any]:
    """The fields that differ from their defaults: the short way to name a record.

    Schedules are given as dictionaries.
    """
    values = to_dict(record)
    for f in fields(record):
        if f.default is not MISSING and f.default == values[f.name]:
            del values[f.name]
    return values


def swept(record: Any) -> list[str]:
    """Names of the fields that may differ between stacked trials."""
    cls: Any = type(record)
    return list(_swept_of(cls))


@cache
def _swept_of(cls: Any) -> tuple[str, ...]:
    """The swept fields of a class: those that say so, else those whose type admits a tensor."""
    names = []
    types: dict[str, Any] | None = None
    for f in fields(cls):
        choice = f.metadata.get("swept")
        if choice is None:
            types = types or _types_of(cls)
            choice = _admits_tensor(types[f.name])
        if choice:
            names.append(f.name)
    return tuple(names)


def _types_of(cls: Any) -> dict[str, Any]:
    """The types of a class's fields, whether they are written as text or not."""
    try:
        return get_type_hints(cls)
    except NameError as error:
        raise InputError(
            f"the types of {cls.__name__}'s fields cannot be read ({error}), so it is unclear "
            "which "
            "of them a sweep may vary; import that name at run time, or give every field "
            "param(..., swept=True) or swept=False"
        ) from error


def _admits_tensor(hint: Any) -> bool:
    """Whether a value of this type can be a tensor, alone or as one of several types."""
    if get_origin(hint) in (Union, UnionType):
        return any(_admits_tensor(part) for part in get_args(hint))
    return hint is Tensor


# ---- a sweep ----


def signature(record: Any) -> tuple[Any, ...]:
    """What must be equal for records to be stacked, as one hashable value.

    That is their type, their static fields, and for each swept field whether it holds a number, a
    schedule or a word such as "auto".
    """
    free = swept(record)
    parts: list[Any] = [type(record)]
    for f in fields(record):
        value = getattr(record, f.name)
        if is_dataclass(value) and f.name in free:
            parts.append(signature(value))
        elif f.name not in free or not _is_number(value):
            parts.append(value)
    return tuple(parts)


def filled(record: R, **values: Any) -> R:
    """The same record with some fields filled in by the engine, which needs no new check.

    >>> @hyper
    ... class Halves:
    ...     l2: float = param(default=0.0, doc="penalty")
    >>> filled(Halves(), l2=0.5)
    Halves(l2=0.5)
    """
    copied: R = copy(record)
    for name, value in values.items():
        object.__setattr__(copied, name, value)  # records are frozen
    return copied


def stack(
    records: Sequence[R],
    dtype: torch.dtype,
    device: torch.device,
) -> R:
    """One record whose swept fields are tensors [trials, 1]: a grid of records *is* the sweep.

    Args:
        records: One for each trial, all with the same `signature`.
        dtype: Of the tensors, that of the run.
        device: Where they are.

    Returns:
        A record of the same type. Words such as "auto", and None, stay as they are; schedules are
        stacked field by field.

    Raises:
        InputError: The records differ in more than swept numbers.
    """
    if len({signature(r) for r in records}) != 1:
        raise InputError("only records of one type with equal static fields can be stacked")
    first: Any = records[0]
    values = {f.name: getattr(first, f.name) for f in fields(first)}
    for name in swept(first):
        column = [getattr(r, name) for r in records]
        if is_dataclass(column[0]):
            values[name] = stack(column, dtype, device)
        elif _is_number(column[0]):
            values[name] = torch.tensor(column, dtype=dtype, device=device).reshape(-1, 1)
    stacked: R = object.__new__(type(first))
    for name, value in values.items():
        object.__setattr__(stacked, name, value)  # each record was checked when it was made
    return stacked


def _is_number(value: Any) -> bool:
    """Whether a swept field holds a number, not a word such as "auto" or nothing."""
    return not (value is None or isinstance(value, str))
