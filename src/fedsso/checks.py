"""Checks of hyper-parameters that records share."""

from __future__ import annotations

from math import isfinite
from typing import Any

from .errors import InputError
from .schedule import Decay


def positive(record: Any, *names: str) -> None:
    """Each named field must be a positive finite number or a schedule."""
    for name in names:
        value = getattr(record, name)
        if isinstance(value, Decay):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InputError(f"{name} must be a number or a schedule, got {value!r}")
        if not (value > 0 and isfinite(value)):
            raise InputError(f"{name} must be > 0, got {name}={value!r}; try {name}=0.01")


def at_least(record: Any, name: str, bound: int) -> None:
    """A named field must be an integer not below the bound, or None where the record allows it."""
    value = getattr(record, name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < bound):
        raise InputError(f"{name} must be an integer >= {bound}, got {name}={value!r}")
