"""The one error that a user sees, and the checks of names and numbers that raise it.

A good message names the value that was given, says what is allowed, and tells the user what to do
about it. The functions here write such messages for the most common mistakes: a name that does not
exist, a value that is not an integer, a value that is not a number.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from numbers import Real
from typing import SupportsIndex

# The largest number of rounds, steps, rows or clients. More than that is a typing error.
MOST = 10**9


class InputError(ValueError):
    """Invalid input. The command line prints the message and exits with code 2.

    The message is written for the person who holds the data, so it may quote values from a row.
    The attribute `public` is for everybody else, for example the server that a client answers to.
    It gives the kind of problem, the name of a column and a count, but never a value of a row.

    >>> from fedsso import FedAvg
    >>> try:
    ...     FedAvg(alpha=-1)
    ... except InputError as error:
    ...     print(error)
    alpha must be > 0 and finite, got alpha=-1; leave it out for the default
    """

    kind = "wrong input"

    def __init__(self, message: str, *, public: str = "") -> None:
        super().__init__(message)
        self.public = public or f"{self.kind}; details are in the client's own log"


def unknown(
    kind: str,
    name: object,
    known: Iterable[str],
    also: Mapping[str, str] | None = None,
) -> InputError:
    """Make the error for a name that does not exist. It suggests the name that was probably meant.

    `kind` says what was named ("data set", "option"), `known` lists the names that exist. `also`
    maps names that other libraries use to ours, for names that do not look alike.

    >>> print(unknown("model", "mpl", ["mclr", "mlp"]))
    unknown model 'mpl'; did you mean 'mlp'? Known: mclr, mlp.
    >>> print(unknown("option", "n_nodes", ["clients", "seed"], also={"n_nodes": "clients"}))
    unknown option 'n_nodes'; did you mean 'clients'? Known: clients, seed.
    """
    names = sorted(known)
    meant = _probably_meant(str(name), names, also or {})
    hint = f"; did you mean {meant!r}?" if meant else "."
    listed = ", ".join(names)
    return InputError(f"unknown {kind} {name!r}{hint} Known: {listed}.")


def _probably_meant(
    name: str,
    names: list[str],
    also: Mapping[str, str],
) -> str:
    """The name that a wrong name stands for: a known other name of it, or the most similar one."""
    other = also.get(name, "")
    if other in names:
        return other
    small = {one.lower(): one for one in names}  # FedSSO is near to fedsso
    similar = get_close_matches(name.lower(), list(small), n=1)
    return small[similar[0]] if similar else ""


def one_of(kind: str, name: object, known: Iterable[str]) -> str:
    """Return the name if it is one of the known names. Otherwise raise the error of `unknown`.

    >>> one_of("model", "mlp", ["mclr", "mlp"])
    'mlp'
    """
    names = list(known)
    if isinstance(name, str) and name in names:
        return name
    raise unknown(kind, name, names)


def integer(
    name: str,
    value: object,
    least: int | None = None,
    most: int = MOST,
) -> int:
    """Return the value as a Python int. Raise InputError if it is not a whole number in bounds.

    Integers of numpy and torch are accepted. A bool is not, because True is rarely meant as 1.
    Without `least` there are no bounds at all, and `most` is ignored.

    >>> integer("rounds", 20, least=1)
    20
    """
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        with suppress(TypeError):  # an array of several integers also looks like one
            whole = operator.index(value)
            if least is None:
                return whole
            if whole > most:
                size = _size(whole)
                raise InputError(f"{name} must be at most {most}, got {name}={size}")
            if whole >= least:
                return whole
    bound = "" if least is None else f" >= {least}"
    raise InputError(f"{name} must be an integer{bound}, got {name}={value!r}")


def _size(whole: int) -> str:
    """A large integer in a few characters, for a message."""
    return f"{whole:.3g}" if whole < 10**300 else "an integer beyond 1e300"


def number(name: str, value: object) -> float:
    """Return the value as a Python float. It may be infinite or NaN; the caller checks bounds.

    >>> number("alpha", 1)
    1.0
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{name} must be a number, got {name}={value!r}")
    try:
        return float(value)
    except OverflowError:
        raise InputError(
            f"{name} must be a number below 1e308 in size, got an integer beyond it"
        ) from None
