"""What Ctrl-C, SIGTERM and SIGHUP do to a command.

A first signal lets the command leave through every `finally`, so that no file stays half-written. A
second one ends it at once. This module imports nothing that is slow to load, because a signal may
come while torch is being imported.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from .exits import INTERRUPTED

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SHOW_CURSOR = b"\x1b[?25h"
"""What makes a terminal show its cursor again, which a progress bar hides."""
Handler = Callable[..., object]
"""What is called for a signal."""


def listen(handler: Handler) -> None:
    """Call a function for every signal from now on.

    Signals that the parent process told us to ignore, as nohup does, stay ignored.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


@contextmanager
def listening(handler: Handler) -> Iterator[None]:
    """Call a function for every signal within a block. Afterwards all is as before.

    Signals can be set in the main thread only; elsewhere Python raises ValueError.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    listen(handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def at_once(*_: object) -> None:
    """End the process now, without waiting for anything. Only the cursor is shown again."""
    is_terminal = os.isatty(2)
    if is_terminal and os.environ.get("TERM") not in ("dumb", "unknown"):
        with suppress(OSError):
            os.write(2, SHOW_CURSOR)
    os._exit(INTERRUPTED)


def unwind(*_: object) -> None:
    """Leave through every `finally`, so that no half-written file stays.

    The next signal ends the process at once.
    """
    listen(at_once)
    with suppress(RuntimeError, OSError):  # the signal may have come in the middle of a write
        print("interrupted", file=sys.stderr)
    raise SystemExit(INTERRUPTED)
