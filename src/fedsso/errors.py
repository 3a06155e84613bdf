"""The one error a user sees: it names the value, the bound and the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class InputError(ValueError):
    """Wrong input. The command line prints the message alone and exits with code 2."""


def unknown(kind: str, name: str, known: Iterable[str]) -> InputError:
    """An error for a name that is not in a list, with the nearest one that is."""
    names = sorted(known)
    near = get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return InputError(f"unknown {kind} {name!r}{hint} Known: {', '.join(names)}.")
