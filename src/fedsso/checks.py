"""Checks of hyper-parameters that records share."""

from __future__ import annotations

from math import isfinite
from typing import Any

from .errors import InputError, integer, number
from .schedule import Decay


def positive(record: Any, *names: str, schedules: bool = True) -> None:
    """Each named field must be a positive finite number, or a schedule where that is allowed; it becomes a float."""
    for name in names:
        value = getattr(record, name)
        if schedules and isinstance(value, Decay):
            continue
        value = number(name, value)
        if not (value > 0 and isfinite(value)):
            raise InputError(f"{name} must be > 0 and finite, got {name}={value:g}; leave it out for the default")
        object.__setattr__(record, name, value)  # 1 and 1.0 are the same setting


def at_least(record: Any, name: str, bound: int, none: bool = False) -> None:
    """A named field must be an integer not below the bound; None only where the record allows it."""
    value = getattr(record, name)
    if not (none and value is None):
        object.__setattr__(record, name, integer(name, value, bound))
