"""Which of the processes that torchrun has started this one is, by its environment.

It imports nothing that is slow to load: a command must know it before it prints its first word.
"""

from __future__ import annotations

import os


def number() -> int:
    """The number of this process, from 0; 0 where it is the only one."""
    if count() == 1:
        return 0
    return _whole("RANK", 0)


def count() -> int:
    """How many processes there are."""
    return max(1, _whole("WORLD_SIZE", 1))


def _whole(name: str, default: int) -> int:
    """A whole number from the environment."""
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default
