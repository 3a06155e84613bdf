"""Runs while they train: a dashboard on a terminal, and scalars for TensorBoard."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..errors import InputError
from ..experiment.spec import Spec
from ..experiment.trace import Trace
from ..support.files import check_writable
from .screen import visible

BLOCKS = "▁▂▃▄▅▆▇█"
STYLES = {
    "running": "cyan",
    "waiting": "dim",
    "done": "green",
    "diverged": "bold red",
    "stopped": "yellow",
}
TITLES = {"test_accuracy": "accuracy", "test_loss": "test loss"}
WIDE = 100  # columns of a terminal from which on the details are shown, too
COLUMNS = 45  # of a terminal, for all but the label and the curve
DETAILS = {"best": 8, "MB": 8, "seed": 6}  # the columns that they take
LABEL, CURVE = 30, (8, 40)  # columns of a label at most; of a curve at least and at most
FRAME = 7  # lines of the dashboard that are not runs, and one for the cursor


def sparkline(values: ArrayLike, width: int, low: float = math.nan, high: float = math.nan) -> str:
    """Values as at most `width` blocks, low to high (left out: the least and the greatest).

    Where several values share a block it shows the last of them; a gap stands where no value is
    finite.
    """
    found = np.asarray(values, np.float64)
    finite = found[np.isfinite(found)]
    if not len(finite):
        return " " * min(width, len(found))
    least = low if math.isfinite(low) else float(finite.min())
    most = high if math.isfinite(high) else float(finite.max())
    return "".join(
        _block(part, least, most) for part in np.array_split(found, min(width, len(found)))
    )


def _block(part: NDArray[np.float64], low: float, high: float) -> str:
    finite = part[np.isfinite(part)]
    if not len(finite):
        return " "
    share = (float(finite[-1]) - low) / (high - low) if high > low else 0.0
    return BLOCKS[round(min(max(share, 0.0), 1.0) * (len(BLOCKS) - 1))]


# ---- the dashboard ----


@dataclass(eq=False)
class Line:
    """One run as far as it has been seen."""

    spec: Spec
    trace: Trace | None = None
    before: int = 0  # rounds it had done when it was first seen

    def see(self, trace: Trace) -> None:
        """The trace has grown."""
        if self.trace is None:
            self.before = len(trace) - 1
        self.trace = trace

    @property
    def label(self) -> str:
        """Algorithm and settings in short, as they are shown."""
        return visible(self.spec.label)

    @property
    def rounds(self) -> int:
        """Those to do."""
        return int(self.spec.options["rounds"])

    @property
    def k(self) -> int:
        """Rounds done; of a diverged run, those before it had."""
        if self.trace is None:
            return 0
        return len(self.trace) - 1 if self.trace.diverged is None else self.trace.diverged - 1

    @property
    def state(self) -> str:
        """waiting, running, done or diverged."""
        if self.trace is None:
            return "waiting"
        if self.trace.diverged is not None:
            return "diverged"
        goal = self.spec.options["stop_at"]
        reached = goal is not None and self.last("test_accuracy") >= goal
        return "done" if reached or self.k >= self.rounds else "running"

    @property
    def counted(self) -> int:
        """Rounds that need not be waited for."""
        return self.rounds if self.state in ("done", "diverged") else self.k

    def values(self, name: str) -> NDArray[np.float64]:
        """What is known of a column; of a diverged run, until then."""
        if self.trace is None:
            return np.empty(0)
        column: NDArray[np.float64] = self.trace[name][: self.k + 1]
        return column[np.isfinite(column)]

    def last(self, name: str) -> float:
        """The newest value of a column, NaN if there is none."""
        return float([math.nan, *self.values(name)][-1])

    def curve(self, name: str) -> NDArray[np.float64]:
        """A column without the initial model, which is far from all that follows."""
        return self.values(name)[1:]

    @property
    def megabytes(self) -> float:
        """Sent both ways so far."""
        if self.trace is None:
            return 0.0
        return float(self.trace["bytes_up"].sum() + self.trace["bytes_down"].sum()) / 1e6


class Dashboard:
    """A table of all runs with a bar above it, redrawn in place while they train."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.lines: dict[str, Line] = {}
        self.began = time.monotonic()
        self.open = True
        self.live = Live(console=console, get_renderable=self.render, refresh_per_second=4)

    def __enter__(self) -> Self:
        self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.open = False
        self.live.stop()

    def begin(self, specs: Sequence[Spec]) -> None:
        """These are to run."""
        self.lines = {**self.lines, **{spec.identity: Line(spec) for spec in specs}}

    def look(self, specs: Sequence[Spec], traces: Sequence[Trace]) -> None:
        """These have done so much."""
        for spec, trace in zip(specs, traces, strict=True):
            self.lines[spec.identity].see(trace)

    def render(self) -> RenderableType:
        """What is drawn now."""
        lines = list(self.lines.values())
        if not lines:
            return Text("")
        name = (
            "test_accuracy"
            if any(len(line.values("test_accuracy")) for line in lines)
            else "test_loss"
        )
        shown = _chosen(lines, name, max(3, self.console.height - FRAME))
        parts: list[RenderableType] = [self._bar(lines), "", self._table(shown, name)]
        if len(shown) < len(lines):
            rest = Counter(self._state(line) for line in lines if line not in shown)
            counts = ", ".join(f"{count} {state}" for state, count in rest.items())
            parts.append(Text(f"and {rest.total()} more: {counts}", style="dim"))
        return Group(*parts)

    def _state(self, line: Line) -> str:
        return "stopped" if line.state == "running" and not self.open else line.state

    def _bar(self, lines: Sequence[Line]) -> Table:
        done, total = sum(line.counted for line in lines), sum(line.rounds for line in lines)
        over = sum(line.state in ("done", "diverged") for line in lines)
        spent = time.monotonic() - self.began
        fresh = sum(line.counted - min(line.before, line.counted) for line in lines)
        left = (
            "" if done == total or not fresh else f", {_time((total - done) * spent / fresh)} left"
        )
        grid = Table.grid(padding=(0, 2))
        bar = ProgressBar(
            total=total, completed=done, width=max(10, min(40, self.console.width - 50))
        )
        grid.add_row(
            f"{over} of {len(lines)} runs",
            bar,
            f"{100 * done // total}%",
            f"{_time(spent)} spent{left}",
        )
        return grid

    def _table(self, lines: Sequence[Line], name: str) -> Table:
        several = len({line.spec.seed for line in self.lines.values()}) > 1
        details = [
            *(("best", "MB") if self.console.width >= WIDE else ()),
            *(("seed",) if several else ()),
        ]
        label = min(LABEL, max(len(line.label) for line in lines))
        room = self.console.width - COLUMNS - label - sum(DETAILS[title] for title in details)
        room, scale = min(max(room, CURVE[0]), CURVE[1]), _scale(lines, name)
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
        rows = [self._cells(line, name, room, scale) for line in lines]
        titles = [title for title in rows[0] if title in details or title not in DETAILS]
        table.add_column("run")
        for title in titles:
            left = title in ("by round", "state")
            table.add_column(title, justify="left" if left else "right", no_wrap=True)
        for line, cells in zip(lines, rows, strict=True):
            run = Text(
                line.label, no_wrap=True, overflow="ellipsis"
            )  # gives way where it is narrow
            table.add_row(run, *(cells[title] for title in titles))
        return table

    def _cells(
        self, line: Line, name: str, room: int, scale: tuple[float, float]
    ) -> dict[str, Text]:
        """What is told of a run, by the titles of the columns."""
        state = self._state(line)
        return {
            "seed": Text(str(line.spec.seed)),
            "round": Text(f"{line.k}/{line.rounds}"),
            TITLES[name]: _newest(line, name),
            "best": Text(_number(_best(line, name))),
            "train loss": _newest(line, "train_loss"),
            "by round": Text(sparkline(line.curve(name), room, *scale).ljust(room), style="blue"),
            "MB": Text(f"{line.megabytes:.{1 if line.megabytes < 100 else 0}f}"),
            "state": Text(state, style=STYLES[state]),
        }


def _chosen(lines: Sequence[Line], name: str, room: int) -> list[Line]:
    """As many as there is room for, in their order: those that run, then the best, then those that
    wait."""
    if len(lines) <= room:
        return list(lines)

    def rank(line: Line) -> tuple[bool, float]:
        best = _best(line, name)
        return line.state != "running", math.inf if math.isnan(best) else best if name.endswith(
            "loss"
        ) else -best

    first = {id(line) for line in sorted(lines, key=rank)[: room - 1]}
    return [line for line in lines if id(line) in first]


def _scale(lines: Sequence[Line], name: str) -> tuple[float, float]:
    """The range of a column over the runs that have not diverged, so that their curves compare."""
    values = np.concatenate(
        [line.curve(name) for line in lines if line.state != "diverged"] or [np.empty(0)]
    )
    return (float(values.min()), float(values.max())) if len(values) else (math.nan, math.nan)


def _best(line: Line, name: str) -> float:
    values = line.values(name)
    if not len(values):
        return math.nan
    return float(values.min() if name.endswith("loss") else values.max())


def _newest(line: Line, name: str) -> Text:
    """The newest value of a column, and where it went."""
    values = line.values(name)
    if len(values) < 2:
        return Text(f"{_number(line.last(name))}  ")
    step = float(values[-1] - values[-2])
    better = step < 0 if name.endswith("loss") else step > 0
    arrow = "↑" if step > 0 else "↓" if step < 0 else "→"
    return Text.assemble(
        f"{_number(float(values[-1]))} ",
        (arrow, "green" if better else "yellow" if step else "dim"),
    )


def _number(value: float) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.2e}"


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


# ---- TensorBoard ----

EVENTS = "events.out.tfevents."
INDEX = ("trial", "seed", "round")


def check_tensorboard(folder: Path | None) -> Path | None:
    """Refuse a folder for TensorBoard where nothing could be written for it."""
    if folder is not None:
        try:
            import tensorboard.summary.writer.event_file_writer  # noqa: F401
        except ImportError as error:
            message = (
                "--tensorboard needs a package that is not there: "
                f"`pip install tensorboard` ({error})"
            )
            raise InputError(message) from error
    return folder


class Scalars:
    """Writes the columns of the traces as they grow, each run into a folder of its own.

    A run that has been written before, by an interrupted call, is written anew: its trace begins
    with round 0 again.
    """

    def __init__(self, folder: Path) -> None:
        check_writable(folder)
        self.folder = folder
        self.writers: dict[str, Any] = {}
        self.written: dict[str, int] = {}  # rows

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for writer in self.writers.values():
            writer.close()

    def look(self, specs: Sequence[Spec], traces: Sequence[Trace]) -> None:
        """Write the new rows, and make sure that they are in the files."""
        try:
            for spec, trace in zip(specs, traces, strict=True):
                self._write(spec, trace)
        except OSError as error:
            message = (
                f"cannot write TensorBoard's files to {self.folder}: {error.strerror}; "
                "give another --tensorboard"
            )
            raise InputError(message) from error

    def _write(self, spec: Spec, trace: Trace) -> None:
        key, first = spec.identity, self.written.get(spec.identity, 0)
        if len(trace) <= first:
            return
        writer = self.writers[key] = self.writers.get(key) or self._opened(spec)
        for event in _events(trace, first):
            writer.add_event(event)
        writer.flush()
        self.written[key] = len(trace)
        if len(trace) > spec.options["rounds"]:  # it cannot grow any more
            self.writers.pop(key).close()

    def _opened(self, spec: Spec) -> Any:
        """A writer in the folder of the run's label and seed; its files have the run's identity at
        their end."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        mark = f".{spec.identity[:12]}"
        folder = self.folder / spec.folder(0).partition("-")[2]
        if any(
            not path.name.endswith(mark) for path in folder.glob(f"{EVENTS}*")
        ):  # another run of this label
            folder = folder.with_name(f"{folder.name}-{spec.identity[:6]}")
        for path in folder.glob(f"{EVENTS}*{mark}"):
            path.unlink()
        writer = EventFileWriter(str(folder), filename_suffix=mark)
        again = SessionLog(
            status=SessionLog.START
        )  # a TensorBoard that has read the old files forgets them
        writer.add_event(Event(wall_time=time.time(), step=0, session_log=again))
        return writer


def _events(trace: Trace, first: int) -> list[Any]:
    """One event for each row from `first` on, with every number of the row that is known."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    spent = np.cumsum(trace["seconds"])
    ended = time.time() - (spent[-1] - spent)
    columns = {name: column for name, column in trace.columns.items() if name not in INDEX}
    events = []
    for row in range(first, len(trace)):
        known = {
            name: float(column[row])
            for name, column in columns.items()
            if not np.isnan(column[row])
        }
        values = [Summary.Value(tag=name, simple_value=value) for name, value in known.items()]
        events.append(
            Event(
                wall_time=ended[row], step=int(trace["round"][row]), summary=Summary(value=values)
            )
        )
    return events
