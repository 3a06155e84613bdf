"""Records of hyper-parameters, and how several of them become one sweep.

A *record* is a frozen dataclass made by ``@hyper``. Its fields annotated ``Scalar`` or ``Step`` may
differ between the trials of a sweep; all others (a name, a window length) are static: trials that
differ there are run apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, dataclass_transform, get_args

import torch
from torch import Tensor

from ..errors import InputError, unknown

R = TypeVar("R")


SWEPT = ("Scalar", "Step", "Step | Auto")


def param(*, default: Any, doc: str) -> Any:
    """A record's field with a default and one line that names the paper's symbol."""
    return field(default=default, metadata={"doc": doc})


@dataclass_transform(frozen_default=True, field_specifiers=(field, param))
def hyper(cls: type[R]) -> type[R]:
    """Make a class a frozen record whose ``Scalar`` and ``Step`` fields can be stacked over trials."""
    return dataclass(frozen=True)(cls)


def swept(record: Any) -> list[str]:
    """Names of the fields that may differ between stacked trials: by the text of their type, or the
    type itself."""
    return [f.name for f in fields(record) if f.type in SWEPT or Tensor in get_args(f.type)]


def fields_of(cls: Any) -> tuple[Field[Any], ...]:
    """The fields of a record or of its class."""
    return fields(cls)


def build(cls: type[R], values: dict[str, Any]) -> R:
    """A record from keyword values, with a clear error for a name it does not have."""
    names = [f.name for f in fields_of(cls)]
    for name in values:
        if name not in names:
            raise unknown(f"field of {cls.__name__}", name, names)
    return cls(**values)


def to_dict(record: Any) -> dict[str, Any]:
    """A record's fields as plain values; nested records (schedules) become nested dictionaries."""
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    return {k: to_dict(v) if is_dataclass(v) else v for k, v in values.items()}


def changed(record: Any) -> dict[str, Any]:
    """The fields that differ from their defaults: the short way to name a record."""
    defaults = {f.name: f.default for f in fields(record) if f.default is not MISSING}
    return {k: v for k, v in to_dict(record).items() if k not in defaults or defaults[k] != v}


def signature(record: Any) -> tuple[Any, ...]:
    """What must be equal for records to be stacked: their type, static fields and the types of
    swept ones."""
    free = set(swept(record))
    parts: list[Any] = [type(record)]
    for f in fields(record):
        value = getattr(record, f.name)
        if f.name not in free:
            parts.append(value)
        elif is_dataclass(value):
            parts.append(signature(value))
        elif isinstance(value, str):
            parts.append(value)
    return tuple(parts)


def stack(records: Sequence[R], dtype: torch.dtype, device: torch.device) -> R:
    """One record whose swept fields are tensors [trials, 1]: a grid of records *is* the sweep."""
    if len({signature(r) for r in records}) != 1:
        raise InputError("only records of one type with equal static fields can be stacked")
    first: Any = records[0]
    values = {f.name: getattr(first, f.name) for f in fields(first)}
    for name in swept(first):
        column = [getattr(r, name) for r in records]
        if is_dataclass(column[0]):
            values[name] = stack(column, dtype, device)
        elif not isinstance(column[0], str):
            values[name] = torch.tensor(column, dtype=dtype, device=device).reshape(-1, 1)
    stacked: R = object.__new__(type(first))
    for name, value in values.items():
        object.__setattr__(stacked, name, value)  # validated one by one already
    return stacked
