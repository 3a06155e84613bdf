"""What Ctrl-C, SIGTERM and SIGHUP do to the command. Nothing here is slow to import."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from .exits import INTERRUPTED

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SHOW_CURSOR = b"\x1b[?25h"
Handler = Callable[..., object]


def listen(handler: Handler) -> None:
    """Let a function hear the signals; those that the parent had ignored (nohup) stay ignored."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


@contextmanager
def listening(handler: Handler) -> Iterator[None]:
    """The same within a block."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    listen(handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def at_once(*_: object) -> None:
    """End without waiting for anything; a cursor that a display had hidden comes back."""
    if os.isatty(2) and os.environ.get("TERM") not in ("dumb", "unknown"):
        with suppress(OSError):
            os.write(2, SHOW_CURSOR)
    os._exit(INTERRUPTED)


def unwind(*_: object) -> None:
    """Leave through every `finally`, so that no half-written file stays; the next signal does not
    wait."""
    listen(at_once)
    with suppress(RuntimeError, OSError):  # the signal may have come in the middle of a write
        print("interrupted", file=sys.stderr)
    raise SystemExit(INTERRUPTED)
