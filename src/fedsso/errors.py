"""The one error a user sees: it names the value, the bound and the remedy."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from numbers import Real
from typing import SupportsIndex

MOST = 10**9  # rounds, steps, rows, clients: more is a slip


class InputError(ValueError):
    """Wrong input. The command line prints the message alone and exits with code 2.

    The message is for whoever holds the data: it may quote them. `public` is for everybody else,
    such as the server that a client answers to: a kind, the name of a column and a count, never a
    value of a row.
    """

    kind = "wrong input"

    def __init__(self, message: str, *, public: str = "") -> None:
        super().__init__(message)
        self.public = public or f"{self.kind}; details are in the client's own log"


def unknown(
    kind: str, name: object, known: Iterable[str], also: Mapping[str, str] | None = None
) -> InputError:
    """An error for a name that is not in a list, with the name that was probably meant.

    `also` holds other names by which people know something, with the name that it has here.
    """
    names = sorted(known)
    near = get_close_matches(str(name), names, n=1)
    other = (also or {}).get(str(name))
    if other is not None and other in names:
        near = [other]
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return InputError(f"unknown {kind} {name!r}{hint} Known: {', '.join(names)}.")


def one_of(kind: str, name: object, known: Iterable[str]) -> str:
    """The name, if it is in the list."""
    names = list(known)
    if isinstance(name, str) and name in names:
        return name
    raise unknown(kind, name, names)


def integer(name: str, value: object, least: int | None = None, most: int = MOST) -> int:
    """The value as an int; numpy's integers are, a bool is not. Without a `least` there is no
    `most` either."""
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        with suppress(TypeError):  # an array of several
            whole = operator.index(value)
            if least is not None and whole > most:
                raise InputError(f"{name} must be at most {most}, got {name}={_size(whole)}")
            if least is None or whole >= least:
                return whole
    bound = "" if least is None else f" >= {least}"
    raise InputError(f"{name} must be an integer{bound}, got {name}={value!r}")


def _size(whole: int) -> str:
    return f"{whole:.3g}" if whole < 10**300 else "an integer beyond 1e300"


def number(name: str, value: object) -> float:
    """The value as a float, of Python or numpy; it may be infinite or NaN."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{name} must be a number, got {name}={value!r}")
    try:
        return float(value)
    except OverflowError:
        raise InputError(
            f"{name} must be a number below 1e308 in size, got an integer beyond it"
        ) from None
