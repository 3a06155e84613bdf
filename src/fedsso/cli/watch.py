"""Rounds as they end: bars or lines on standard error, and what happens when a run is interrupted.

A signal to stop takes effect between two rounds. What is kept then can be continued, and the last
message says by which command.

`Watch` is the progress callback of the commands, `Viewing` one that also shows traces. `watching`
is the block in which they work: it draws, listens to signals, and ends the command in order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from shlex import quote
from typing import TYPE_CHECKING, Any

import typer
from rich.highlighter import NullHighlighter
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from ..engine.ranks import RankLost
from ..errors import InputError
from ..experiment.execute import Newest, Tenths, is_due, told_of
from ..experiment.workers import OutOfTime
from ..support import processes
from ..support.exits import INTERRUPTED, TIME_IS_UP
from ..support.stopping import at_once, listen, listening
from .live import Dashboard
from .screen import complain, draws, messages, say, visible
from .tensorboard import Scalars

if TYPE_CHECKING:
    from pathlib import Path

    from ..experiment.execute import Standing
    from ..experiment.spec import Spec
    from ..experiment.trace import Trace

log = logging.getLogger("fedsso")
AGAIN = "the same command"  # goes on with a sweep, and with the work of `fedsso paper`


class Watch:
    """Shows the rounds as they end, and remembers the last one.

    It is called after each round, with the run's label, the round k, the number of rounds and what
    was measured. Of a sweep it is told by `count`, which has the trials as well. `silent` says that
    something else shows the rounds.
    """

    silent = False

    def __init__(self) -> None:
        """Prepare the bars; nothing is drawn before the first round."""
        self.label = ""
        self.k = 0
        self.reached = "round 0"  # what the last message says if it is interrupted
        self.share = 0.0  # of a sweep's phase
        self.tenths = Tenths()
        self.newest = Newest()
        self.stopping = False
        self.bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=messages,
        )
        self.task = TaskID(0)

    def __call__(
        self,
        label: str,
        k: int,
        rounds: int,
        numbers: dict[str, float],
    ) -> None:
        """Show a round, and end the simulation here if a signal came.

        Args:
            label: The run, or what runs together.
            k: The rounds done.
            rounds: All rounds.
            numbers: What was measured, by name.
        """
        label = visible(label)
        if not self.silent:
            self._show(label, k, rounds, numbers)
        self.label = label
        self.k = k
        self.reached = f"round {k}"
        self._stop_if_asked()

    def count(self, now: Standing, numbers: dict[str, float]) -> None:
        """Show how far a sweep is, and end it here if a signal came.

        Args:
            now: Its phase, its trials, and the batch that has done a round.
            numbers: What was measured, by name.
        """
        if not self.silent:
            self._show_sweep(now, self.newest.words(numbers))
        self.label = now.phase
        self.share = now.share
        self.reached = f"{now.done} of {now.trials} trials"
        self._stop_if_asked()

    def note(self, text: str) -> None:
        """Say something between two pieces of work."""
        say(text)
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        """End the simulation here if a signal came.

        Between two rounds everything is whole. KeyboardInterrupt lets the runs save what they
        have.
        """
        if self.stopping:
            raise KeyboardInterrupt

    def _show(
        self,
        label: str,
        k: int,
        rounds: int,
        numbers: dict[str, float],
    ) -> None:
        """Show a round as a bar, or as a line for some of them, at most ten in all.

        Lines are for files and pipes, where a bar could not be drawn again in its place.
        """
        shown = self.newest.told(label, k, numbers)
        begins = label != self.label or k <= self.k  # another run
        if draws():
            if begins:
                self.task = self.bars.add_task(label, total=rounds, numbers="", count="")
            self.bars.update(self.task, completed=k, numbers=shown, count=f"{k}/{rounds}")
            return
        if is_due(k, rounds):
            say(f"{label}: round {k}/{rounds} {shown}".rstrip())

    def _show_sweep(self, now: Standing, shown: str) -> None:
        """Show a sweep as one bar for each phase, or as a line for every tenth of it.

        The bar moves with the rounds of all trials, the text beside it has the trials that are
        done and the round of the batch under way.

        Args:
            now: How far it is.
            shown: What was measured, in words.
        """
        if not draws():
            if self.tenths.due(now):
                say(f"{told_of(now)}  {shown}".rstrip())
            return
        if now.phase != self.label or now.share < self.share:
            self.task = self.bars.add_task(visible(now.phase), total=1.0, numbers="", count="")
        count = f"{now.done}/{now.trials} trials, round {now.k}/{now.rounds}"
        self.bars.update(self.task, completed=now.share, numbers=shown, count=count)

    def stop(self, *_: object) -> None:
        """Take the first signal; a second one ends the process at once."""
        self.stopping = True
        listen(at_once)
        with suppress(RuntimeError):  # the signal may have come in the middle of a write
            say("stopping after this round (Ctrl-C again: at once)")


class Viewing(Watch):
    """A watch that also passes the traces on: to a dashboard, to TensorBoard, or to both.

    A dashboard takes the place of the bars.
    """

    def __init__(
        self,
        board: Dashboard | None,
        scalars: Scalars | None,
    ) -> None:
        super().__init__()
        self.board = board
        self.scalars = scalars
        self.silent = board is not None

    def begin(self, specs: Sequence[Spec]) -> None:
        """Tell the dashboard which runs there will be."""
        if self.board is not None:
            self.board.begin(specs)

    def look(
        self,
        specs: Sequence[Spec],
        traces: Sequence[Trace],
    ) -> None:
        """Show the traces of these runs as far as they have come."""
        for viewer in (self.board, self.scalars):
            if viewer is not None:
                viewer.look(specs, traces)


@contextmanager
def watching(
    again: str | None,
    live: bool = False,
    tensorboard: Path | None = None,
) -> Iterator[Watch]:
    """Progress on standard error while simulating.

    An interrupted simulation ends the command with its exit code, and says how to go on.

    Args:
        again: The command that goes on with the work; None where nothing is kept.
        live: Whether to draw a dashboard, if there is a terminal.
        tensorboard: Where to write files for TensorBoard.

    Yields:
        The progress callback.

    Raises:
        typer.Exit: With exit code 130, after an interrupt.
    """
    # In a file or a pipe nothing can be redrawn, so --live is ignored there.
    board = Dashboard(messages) if live and draws() else None
    scalars = None if tensorboard is None else Scalars(tensorboard)
    watch = Watch()
    if board is not None or scalars is not None:
        watch = Viewing(board, scalars)
    drawn: Any = board
    if board is None and draws():
        drawn = watch.bars
    try:
        with listening(watch.stop), ExitStack() as stack:
            for part in (drawn, scalars):
                if part is not None:
                    stack.enter_context(part)
            yield watch
    except RankLost as lost:
        complain(f"{lost.what}; {_way_on(again)}")
        raise typer.Exit(INTERRUPTED) from lost
    except (KeyboardInterrupt, InputError) as error:
        if isinstance(error, InputError) and not (watch.stopping and _left_alone(error)):
            raise
        # The last line that the user reads: how the work goes on.
        say(f"stopped after {watch.reached}; {_way_on(again)}")
        raise typer.Exit(INTERRUPTED) from error


def _way_on(again: str | None) -> str:
    """How the work goes on, by a command or not at all."""
    return "nothing is kept without --out" if again is None else f"{again} continues"


def _left_alone(error: InputError) -> bool:
    """Whether a sweep's processes are gone: a signal to the whole group ends them before us.

    Then the error is that of a process that ended unexpectedly, but what it means is the
    signal.
    """
    return isinstance(error.__cause__, EOFError | ConnectionError)


def resuming(out: str | Path | None) -> str | None:
    """The command that goes on with the runs of a folder."""
    return None if out is None else f"`fedsso resume {quote(str(out))}`"


def check_minutes(minutes: float | None) -> None:
    """Refuse a time that is over before it begins."""
    if minutes is not None and not minutes > 0:
        raise InputError(f"--minutes must be > 0, got {minutes}")


@contextmanager
def in_time() -> Iterator[None]:
    """End the command with its exit code when the time is up, and say how to go on.

    Raises:
        typer.Exit: With exit code 75.
    """
    try:
        yield
    except OutOfTime as error:
        say(f"time is up: {error}; {AGAIN} continues")
        raise typer.Exit(TIME_IS_UP) from error


def set_logging(verbose: bool) -> None:
    """Send the messages of the library to standard error: warnings, or all with --verbose.

    It replaces the handlers of an earlier call, so that nothing is said twice.
    """
    handler = RichHandler(
        console=messages,
        show_time=False,
        show_path=False,
        highlighter=NullHighlighter(),
    )
    log.handlers = [handler]
    log.setLevel(logging.INFO if verbose else logging.WARNING)
    if processes.number() > 0:  # the first process says the same
        log.setLevel(logging.ERROR)
