"""The columns of the traces for TensorBoard, written while the runs train.

The package `tensorboard` is optional, and imported only when it is asked for. Every run has a
folder of its own below that of --tensorboard, so that TensorBoard shows it as a run of its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path  # typer asks for the types of `check_tensorboard`
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ..errors import InputError
from ..support.files import check_writable

if TYPE_CHECKING:
    from types import TracebackType

    from ..experiment.spec import Spec
    from ..experiment.trace import Trace

EVENTS = "events.out.tfevents."
INDEX = ("trial", "seed", "round")  # columns that are no measurements


def check_tensorboard(folder: Path | None) -> Path | None:
    """Refuse a folder for TensorBoard if the package is not there; returns the folder."""
    if folder is None:
        return None
    try:
        import tensorboard.summary.writer.event_file_writer  # noqa: F401
    except ImportError as error:
        message = (
            "--tensorboard needs a package that is not installed: `pip install "
            f"tensorboard` ({error})"
        )
        raise InputError(message) from error
    return folder


class Scalars:
    """Writes the columns of the traces as they grow, each run into a folder of its own.

    A run that has been written before, by an interrupted call, is written anew: its trace begins
    with round 0 again. Use it as `with Scalars(folder) as scalars`.
    """

    def __init__(self, folder: Path) -> None:
        """Check that the folder can be written; it is made if it is not there."""
        check_writable(folder)
        self.folder = folder
        self.writers: dict[str, Any] = {}  # by the identity of the run
        self.written: dict[str, int] = {}  # rows of each run

    def __enter__(self) -> Self:
        """Nothing is opened before the first run has something to write."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Close the files of the runs that are not over."""
        for writer in self.writers.values():
            writer.close()

    def look(
        self,
        specs: Sequence[Spec],
        traces: Sequence[Trace],
    ) -> None:
        """Write the new rows of these runs, and make sure that they are in the files.

        Args:
            specs: The settings of the runs.
            traces: Their traces, in the same order.

        Raises:
            InputError: A file cannot be written.
        """
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
        """Write the rows of one run that are new; a run with all its rounds is closed.

        A sweep has hundreds of runs, and a process may not open as many files at once.
        """
        key = spec.identity
        first = self.written.get(key, 0)
        if len(trace) <= first:
            return
        if key not in self.writers:
            self.writers[key] = self._opened(spec)
        writer = self.writers[key]
        for event in _events(trace, first):
            writer.add_event(event)
        writer.flush()
        self.written[key] = len(trace)
        if len(trace) > spec.options["rounds"]:
            self.writers.pop(key).close()

    def _opened(self, spec: Spec) -> Any:
        """A writer in the folder of the run's label and seed.

        Its files have the run's identity at the end of their names. Where another run of the same
        label has the folder already, the identity is added to the folder's name.
        """
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        mark = f".{spec.identity[:12]}"
        folder = self.folder / spec.folder(0).partition("-")[2]
        present = list(folder.glob(f"{EVENTS}*"))
        if any(not path.name.endswith(mark) for path in present):
            folder = folder.with_name(f"{folder.name}-{spec.identity[:6]}")
        # Files of the same run by an earlier call, which are written anew.
        for path in folder.glob(f"{EVENTS}*{mark}"):
            path.unlink()
        writer = EventFileWriter(str(folder), filename_suffix=mark)
        # A TensorBoard that has read the old files forgets them when it sees this.
        again = SessionLog(status=SessionLog.START)
        writer.add_event(Event(wall_time=time.time(), step=0, session_log=again))
        return writer


def _events(trace: Trace, first: int) -> list[Any]:
    """One event for each row from `first` on, with every number of the row that is known.

    Args:
        trace: The run so far.
        first: The first row that has not been written yet.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    spent = np.cumsum(trace["seconds"])
    # The newest row ended now; the others that many seconds earlier.
    ended = time.time() - (spent[-1] - spent)
    # The number of the trial, the seed and the round are no curves; the round is the axis.
    columns = {name: column for name, column in trace.columns.items() if name not in INDEX}
    events = []
    for row in range(first, len(trace)):
        values = []
        for name, column in columns.items():
            if not np.isnan(column[row]):
                values.append(Summary.Value(tag=name, simple_value=float(column[row])))
        step = int(trace["round"][row])
        summary = Summary(value=values)
        events.append(Event(wall_time=ended[row], step=step, summary=summary))
    return events
