"""What the environment tells a process: which one of torchrun's it is, and how long to wait.

It imports nothing that is slow to load: a command must know it before it prints its first word.
"""

from __future__ import annotations

import os

from ..errors import InputError


def number() -> int:
    """The number of this process, from 0; 0 where it is the only one."""
    if count() == 1:
        return 0
    return _whole("RANK", 0)


def count() -> int:
    """How many processes there are."""
    return max(1, _whole("WORLD_SIZE", 1))


def seconds_of(name: str, default: float) -> float:
    """A number of seconds from the environment variable of this name.

    Raises:
        InputError: It is not a number above 0.
    """
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise InputError(f"{name} must be a number of seconds above 0, got {text!r}")
    return seconds


def _whole(name: str, default: int) -> int:
    """A whole number from the environment."""
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default
