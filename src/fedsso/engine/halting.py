"""How several processes stop together when a signal comes.

Each process notes the signal and goes on to the end of the round. There all of them learn whether
one was asked to stop, and stop at the same place, where a checkpoint can be written.

torchrun sends the same signal to all processes when one of them has died. The others then find out
in their next all-reduce, which fails at once. Should a round not end within `GRACE` seconds, the
process ends itself: torchrun would kill it without a word some time later.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType

from ..support.exits import INTERRUPTED
from ..support.stopping import SIGNALS, at_once, listening
from .ranks import Team

GRACE = 10.0  # seconds from a signal to the end of the process; torchrun kills after 30


class Halting:
    """Takes the signals while a team computes, as in `with Halting(team): ...`.

    One process alone is left as it is, and so is one that does not compute in its main thread,
    where Python cannot take signals.
    """

    def __init__(self, team: Team) -> None:
        self.team = team
        self._stack = ExitStack()

    def __enter__(self) -> Halting:
        self.team.asked = False
        self.team.halts = False
        main = threading.current_thread() is threading.main_thread()
        if self.team.size > 1 and main:
            self._stack.enter_context(listening(self._note))
            self._stack.enter_context(self._countdown())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _note(self, *_: object) -> None:
        """Take the first signal; a second one ends the process at once."""
        if self.team.asked:
            at_once()
        self.team.asked = True

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """An interrupt within the block is noted, for all processes to stop after a round."""
        try:
            yield
        except KeyboardInterrupt:
            if self.team.size == 1:
                raise
            self.team.asked = True

    def stop_if_agreed(self) -> None:
        """Stop here if all processes know that one was asked to."""
        if self.team.halts:
            raise KeyboardInterrupt

    @contextmanager
    def _countdown(self) -> Iterator[None]:
        """End the process some time after a signal, if the block has not ended by then.

        Python calls a handler when the main thread comes back to it, which a product of matrices
        or a wait for others may delay. A socket is told of the signal at once.
        """
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        over = threading.Event()
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._end_after, args=(ours, over), daemon=True).start()
        try:
            yield
        finally:
            over.set()
            signal.set_wakeup_fd(before)
            theirs.close()

    def _end_after(self, told: socket.socket, over: threading.Event) -> None:
        """Wait for a signal, then for the end of the block, then end the process."""
        number = b"\0"
        while number and number[0] not in SIGNALS:
            number = told.recv(1)  # empty when the block is over
        told.close()
        if not number or over.wait(GRACE):
            return
        text = (
            f"process {self.team.rank} of {self.team.size} was asked to stop, and its round has "
            f"not ended within {GRACE:g} s; `fedsso resume` continues from the last checkpoint\n"
        )
        os.write(2, text.encode())
        os._exit(INTERRUPTED)
