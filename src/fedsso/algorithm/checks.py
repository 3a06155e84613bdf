"""Checks of hyper-parameters that records share."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

from ..errors import MOST, InputError, integer, number
from .schedule import Decay

HUGE = 1e100  # its square is still a number


def positive(record: Any, *names: str, schedules: bool = True) -> None:
    """Each named field must be a positive finite number, or a schedule where that is allowed; it
    becomes a float."""
    for name in names:
        value = getattr(record, name)
        if schedules and isinstance(value, str) and value == "auto":
            raise InputError(
                f"{name}='auto': only FedSSO's alpha is chosen by itself; give a number, as in "
                f"{name}=0.1"
            )
        if not (schedules and isinstance(value, Decay)):
            _within(record, (name,), lambda v: v > 0, "> 0 and finite")


def not_negative(record: Any, *names: str) -> None:
    """Each named field must be a finite number >= 0; it becomes a float."""
    _within(record, names, lambda v: v >= 0, ">= 0 and finite")


def share(record: Any, *names: str) -> None:
    """Each named field must lie in [0, 1); it becomes a float."""
    _within(record, names, lambda v: 0 <= v < 1, "in [0, 1)")


def _within(
    record: Any, names: tuple[str, ...], fits: Callable[[float], bool], bounds: str
) -> None:
    for name in names:
        value = number(name, getattr(record, name))
        if not (fits(value) and isfinite(value) and abs(value) < HUGE):
            raise InputError(
                f"{name} must be {bounds}, got {name}={value:g}; leave it out for the default"
            )
        object.__setattr__(record, name, value)  # 1 and 1.0 are the same setting


def at_least(record: Any, name: str, bound: int, none: bool = False, most: int = MOST) -> None:
    """A named field must be an integer from the bound to `most`; None only where the record allows
    it."""
    value = getattr(record, name)
    if not (none and value is None):
        object.__setattr__(record, name, integer(name, value, bound, most))
