"""Checks of hyper-parameters that records share.

A record calls them in its `__post_init__`. Each refuses a wrong value with an InputError that names
the field, the value and the bound, and writes a right value back in its plain form: a number that
was given as 1 or as numpy's 1.0 becomes the float 1.0, so that equal settings are equal records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from math import isfinite
from typing import Any

from ..errors import MOST, InputError, integer, number

HUGE = 1e100  # its square is still a number


def positive(record: Any, *names: str, schedules: bool = True) -> None:
    """Each named field must be a positive finite number, or a schedule where that is allowed.

    Args:
        record: The record that is being made.
        names: Its fields.
        schedules: Whether a `Decay` is allowed, which has checked itself. "auto" is refused with
            a hint: a record that allows it checks it before.
    """
    for name in names:
        value = getattr(record, name)
        # A schedule checks itself; its class is none.
        if schedules and is_dataclass(value) and not isinstance(value, type):
            continue
        if schedules and isinstance(value, str) and value == "auto":
            raise InputError(
                f"{name}='auto': only FedSSO can choose alpha by itself; give a number, as in "
                f"{name}=0.1"
            )
        _bound(record, name, lambda v: v > 0, "> 0 and finite")


def not_negative(record: Any, *names: str) -> None:
    """Each named field must be a finite number >= 0; schedules are not allowed."""
    for name in names:
        _bound(record, name, lambda v: v >= 0, ">= 0 and finite")


def share(record: Any, *names: str) -> None:
    """Each named field must lie in [0, 1), as a weight of the past does."""
    for name in names:
        _bound(record, name, lambda v: 0 <= v < 1, "in [0, 1)")


def _bound(
    record: Any,
    name: str,
    fits: Callable[[float], bool],
    bounds: str,
) -> None:
    """A named field must be a number that fits; `bounds` says in words which do.

    Infinite numbers, NaN and numbers of 1e100 or more in size never fit.
    """
    value = number(name, getattr(record, name))
    if not (fits(value) and isfinite(value) and abs(value) < HUGE):
        raise InputError(
            f"{name} must be {bounds}, got {name}={value:g}; leave it out for the default"
        )
    object.__setattr__(record, name, value)  # records are frozen


def at_least(
    record: Any,
    name: str,
    bound: int,
    none: bool = False,
    most: int = MOST,
) -> None:
    """A named field must be an integer from `bound` to `most`; None only where `none` allows it.

    Integers of numpy are accepted and become Python's; a bool is not.
    """
    value = getattr(record, name)
    if none and value is None:
        return
    object.__setattr__(record, name, integer(name, value, bound, most))
