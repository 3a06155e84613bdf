"""A dashboard on the terminal: all runs in a table, redrawn in place while they train.

`Line` is one run as far as it has been seen, `Dashboard` the table of all of them with a bar
above. The dashboard is told which runs there are (`begin`) and now and then how far they have
come (`look`). A thread of rich draws it four times a second from what it knows. Where the
terminal is small, columns and runs are left out, the least interesting ones first.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Self

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .screen import visible

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import ArrayLike, NDArray

    from ..experiment.spec import Spec
    from ..experiment.trace import Trace

BLOCKS = "▁▂▃▄▅▆▇█"
STYLES = {
    "running": "cyan",
    "waiting": "dim",
    "done": "green",
    "diverged": "bold red",
    "stopped": "yellow",
}
OVER = ("done", "diverged")  # states of runs that need not be waited for
TITLES = {"test_accuracy": "accuracy", "test_loss": "test loss"}
WIDE = 100  # columns of a terminal from which on the details are shown, too
COLUMNS = 45  # of a terminal, for all but the label and the curve
DETAILS = {"best": 8, "MB": 8, "seed": 6}  # the columns that they take
LABEL = 30  # columns of a label at most
CURVE = (8, 40)  # columns of a curve at least and at most
FRAME = 7  # lines of the dashboard that are not runs, and one for the cursor


# ---- curves of blocks ----


def sparkline(
    values: ArrayLike,
    width: int,
    low: float = math.nan,
    high: float = math.nan,
) -> str:
    """Values as a line of blocks, such as ▁▃▆█.

    Args:
        values: Numbers in their order. Where several share a block, it shows the last of them; a
            gap stands where none is finite.
        width: The most blocks. Fewer values make a shorter line.
        low: The value of the lowest block; not a number: the least value.
        high: The value of the highest block; not a number: the greatest value.

    >>> sparkline([1, 2, 3, 4], 4)
    '▁▃▆█'
    """
    found = np.asarray(values, np.float64)
    finite = found[np.isfinite(found)]
    wide = min(width, len(found))
    if not len(finite):
        return " " * wide
    least = low if math.isfinite(low) else float(finite.min())
    most = high if math.isfinite(high) else float(finite.max())
    parts = np.array_split(found, wide)
    return "".join(_block(part, least, most) for part in parts)


def _block(
    part: NDArray[np.float64],
    low: float,
    high: float,
) -> str:
    """The last finite value as a block, or a gap.

    Values outside of [low, high] get the lowest or the highest block.
    """
    finite = part[np.isfinite(part)]
    if not len(finite):
        return " "
    share = 0.0
    if high > low:
        share = (float(finite[-1]) - low) / (high - low)
    within = min(max(share, 0.0), 1.0)
    return BLOCKS[round(within * (len(BLOCKS) - 1))]


# ---- runs ----


@dataclass(eq=False)
class Line:
    """One run as far as it has been seen.

    Its numbers are those of the newest trace, which grows from look to look. Without a trace the
    run waits. A run that was resumed has done some rounds before, which do not count when the
    pace is estimated.
    """

    spec: Spec
    trace: Trace | None = None
    before: int = 0  # rounds it had done when it was first seen

    def see(self, trace: Trace) -> None:
        """Take a trace that has grown, and note how long the first one was."""
        if self.trace is None:
            self.before = len(trace) - 1
        self.trace = trace

    @property
    def label(self) -> str:
        """Algorithm and settings in short, as they are shown."""
        return visible(self.spec.label)

    @property
    def rounds(self) -> int:
        """How many rounds the run has to do."""
        return int(self.spec.options["rounds"])

    @property
    def k(self) -> int:
        """Rounds done; of a diverged run, those before it had."""
        if self.trace is None:
            return 0
        if self.trace.diverged is not None:
            return self.trace.diverged - 1
        return len(self.trace) - 1

    @property
    def state(self) -> str:
        """One of waiting, running, done and diverged.

        A run is done after its last round, and also when it has reached `stop_at`.
        """
        if self.trace is None:
            return "waiting"
        if self.trace.diverged is not None:
            return "diverged"
        goal = self.spec.options["stop_at"]
        reached = goal is not None and self.last("test_accuracy") >= goal
        return "done" if reached or self.k >= self.rounds else "running"

    @property
    def counted(self) -> int:
        """Rounds that need not be waited for: those done, of a run that is over all."""
        return self.rounds if self.state in OVER else self.k

    def values(self, name: str) -> NDArray[np.float64]:
        """What is known of a column, gaps left out; of a diverged run, until then.

        Args:
            name: A column of the trace.
        """
        if self.trace is None:
            return np.empty(0)
        column: NDArray[np.float64] = self.trace[name][: self.k + 1]
        return column[np.isfinite(column)]

    def last(self, name: str) -> float:
        """The newest value of a column, NaN if there is none."""
        values = self.values(name)
        return float(values[-1]) if len(values) else math.nan

    def best(self, name: str) -> float:
        """The best value of a column, NaN if there is none: of a loss the least."""
        values = self.values(name)
        if not len(values):
            return math.nan
        return float(values.min() if name.endswith("loss") else values.max())

    def curve(self, name: str) -> NDArray[np.float64]:
        """A column without the initial model, which is far from all that follows."""
        return self.values(name)[1:]

    @property
    def megabytes(self) -> float:
        """What was sent so far by the whole federation, in both directions, in 10^6 bytes."""
        if self.trace is None:
            return 0.0
        return float(self.trace["bytes_up"].sum() + self.trace["bytes_down"].sum()) / 1e6


# ---- the dashboard ----


class Dashboard:
    """A table of all runs with a bar above it, redrawn in place while they train.

    Use it as `with Dashboard(console) as board`. Within the block the terminal belongs to it; at
    its end the last state of the table stays on the screen.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.lines: dict[str, Line] = {}  # by the identity of the run
        self.began = time.monotonic()
        self.open = True
        self.live = Live(console=console, get_renderable=self.render, refresh_per_second=4)

    def __enter__(self) -> Self:
        """Begin to draw."""
        self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Draw a last time and stop. Runs that are not over are shown as stopped."""
        self.open = False
        self.live.stop()

    def begin(self, specs: Sequence[Spec]) -> None:
        """Add runs that have not started yet.

        The table may be drawn by another thread at any time, so it is replaced as a whole.
        """
        fresh = {spec.identity: Line(spec) for spec in specs}
        self.lines = self.lines | fresh

    def look(
        self,
        specs: Sequence[Spec],
        traces: Sequence[Trace],
    ) -> None:
        """Take the traces of runs as far as they have come.

        Args:
            specs: The settings of the runs, which `begin` was told.
            traces: Their traces, in the same order.
        """
        for spec, trace in zip(specs, traces, strict=True):
            self.lines[spec.identity].see(trace)

    def render(self) -> RenderableType:
        """What is drawn now: the bar, the table, and a line that counts the runs left out.

        Runs are compared by their accuracy or, where there is none, by their test loss.
        """
        lines = list(self.lines.values())
        if not lines:
            return Text("")
        # A federation with real targets has no accuracy at all, in any run.
        measured = any(len(line.values("test_accuracy")) for line in lines)
        name = "test_accuracy" if measured else "test_loss"
        room = max(3, self.console.height - FRAME)
        shown = _chosen(lines, name, room)
        parts: list[RenderableType] = [self._bar(lines), "", self._table(shown, name)]
        if len(shown) < len(lines):
            rest = Counter(self._state(line) for line in lines if line not in shown)
            counts = ", ".join(f"{count} {state}" for state, count in rest.items())
            parts.append(Text(f"and {rest.total()} more: {counts}", style="dim"))
        return Group(*parts)

    def _state(self, line: Line) -> str:
        """The state of a run; what still ran when the dashboard was closed has stopped."""
        if line.state == "running" and not self.open:
            return "stopped"
        return line.state

    def _bar(self, lines: Sequence[Line]) -> Table:
        """How much of the work is done, and how long the rest will take at this pace.

        The pace is that of the rounds trained in this call, not of those that an earlier call
        left.
        """
        done = sum(line.counted for line in lines)
        total = sum(line.rounds for line in lines)
        over = sum(line.state in OVER for line in lines)
        spent = time.monotonic() - self.began
        # Rounds that this call has trained; those of an earlier call say nothing about the pace.
        fresh = sum(line.counted - min(line.before, line.counted) for line in lines)
        left = ""
        if done < total and fresh:
            left = f", {_time((total - done) * spent / fresh)} left"
        width = max(10, min(40, self.console.width - 50))
        grid = Table.grid(padding=(0, 2))
        grid.add_row(
            f"{over} of {len(lines)} runs",
            ProgressBar(total=total, completed=done, width=width),
            f"{100 * done // total}%",
            f"{_time(spent)} spent{left}",
        )
        return grid

    def _table(self, lines: Sequence[Line], name: str) -> Table:
        """A row for each run.

        Args:
            lines: The runs to show.
            name: The metric by which they are compared.
        """
        details = self._details()
        label = min(LABEL, max(len(line.label) for line in lines))
        taken = COLUMNS + label + sum(DETAILS[title] for title in details)
        least, most = CURVE
        # The curve gets what the other columns leave.
        room = min(max(self.console.width - taken, least), most)
        scale = _scale(lines, name)
        rows = [self._cells(line, name, room, scale) for line in lines]
        titles = [title for title in rows[0] if title in details or title not in DETAILS]
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
        table.add_column("run")
        for title in titles:
            left = title in ("by round", "state")
            table.add_column(title, justify="left" if left else "right", no_wrap=True)
        for line, cells in zip(lines, rows, strict=True):
            run = Text(line.label, no_wrap=True, overflow="ellipsis")  # is cut where it is narrow
            table.add_row(run, *(cells[title] for title in titles))
        return table

    def _details(self) -> list[str]:
        """The columns that are shown only where there is room, or something to tell apart."""
        found = []
        if self.console.width >= WIDE:
            found += ["best", "MB"]
        if len({line.spec.seed for line in self.lines.values()}) > 1:
            found.append("seed")
        return found

    def _cells(
        self,
        line: Line,
        name: str,
        room: int,
        scale: tuple[float, float],
    ) -> dict[str, Text]:
        """What is told of a run, by the titles of the columns.

        Args:
            line: The run.
            name: The metric by which runs are compared.
            room: Columns of the terminal for the curve.
            scale: The values of the lowest and the highest block, the same for all runs.
        """
        state = self._state(line)
        low, high = scale
        curve = sparkline(line.curve(name), room, low, high)
        decimals = 1 if line.megabytes < 100 else 0
        return {
            "seed": Text(str(line.spec.seed)),
            "round": Text(f"{line.k}/{line.rounds}"),
            TITLES[name]: _newest(line, name),
            "best": Text(_number(line.best(name))),
            "train loss": _newest(line, "train_loss"),
            "by round": Text(curve.ljust(room), style="blue"),
            "MB": Text(f"{line.megabytes:.{decimals}f}"),
            "state": Text(state, style=STYLES[state]),
        }


def _chosen(
    lines: Sequence[Line],
    name: str,
    room: int,
) -> list[Line]:
    """As many runs as there is room for, in their order.

    Those that run come first, then the best of the others, then those that wait.

    Args:
        lines: All runs.
        name: The metric by which they are compared.
        room: Lines of the terminal. One of them is for the count of the runs left out.
    """
    if len(lines) <= room:
        return list(lines)

    def rank(line: Line) -> tuple[bool, float]:
        best = line.best(name)
        if math.isnan(best):
            best = math.inf
        elif not name.endswith("loss"):
            best = -best
        return line.state != "running", best

    first = {id(line) for line in sorted(lines, key=rank)[: room - 1]}
    return [line for line in lines if id(line) in first]


def _scale(lines: Sequence[Line], name: str) -> tuple[float, float]:
    """The range of a column over the runs that have not diverged, so that their curves compare.

    Returns:
        The least and the greatest value; not numbers where there are none.
    """
    curves = [line.curve(name) for line in lines if line.state != "diverged"]
    values = np.concatenate(curves or [np.empty(0)])
    if not len(values):
        return math.nan, math.nan
    return float(values.min()), float(values.max())


def _newest(line: Line, name: str) -> Text:
    """The newest value of a column, and an arrow that tells where it went.

    The arrow is green if that is better: up for an accuracy, down for a loss.
    """
    values = line.values(name)
    if len(values) < 2:
        return Text(f"{_number(line.last(name))}  ")
    step = float(values[-1] - values[-2])
    better = step < 0 if name.endswith("loss") else step > 0
    arrow = "→"
    style = "dim"
    if step:
        arrow = "↑" if step > 0 else "↓"
        style = "green" if better else "yellow"
    return Text.assemble(f"{_number(float(values[-1]))} ", (arrow, style))


def _number(value: float) -> str:
    """A number with four decimals, a large one with an exponent; a dash where there is none."""
    if math.isnan(value):
        return "–"
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.2e}"


def _time(seconds: float) -> str:
    """A time as hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))
