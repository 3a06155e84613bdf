"""The trace of a run on Flower: the same columns, tables and plots as those of a simulation.

ClientApps measure what they like, under names of their own. The journal takes the usual names for
losses and accuracies, and keeps everything else that is a number as it comes. `Best` goes by the
loss of the model after a round: the server's, where that evaluates one, or else the clients'.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from math import inf, isfinite
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message
from torch import Tensor

from ..algorithms.cautious import NOTICED, WINDOW
from ..errors import InputError
from ..experiment.trace import COLUMNS, Trace
from .wire import arrays_of

log = logging.getLogger("flwr")

SYNONYMS = {
    "test_loss": ("test_loss", "eval_loss", "val_loss", "loss"),
    "test_accuracy": (
        *("test_accuracy", "eval_accuracy", "val_accuracy", "accuracy"),
        *("test_acc", "eval_acc", "val_acc", "acc"),
    ),
}
"""The names that ClientApps use for what a column of the trace holds."""
COUNTED = {
    "trial": 0,
    "seed": 0,
    "overridden": 0,
    "skipped": 0,
    "bytes_up": 0,
    "bytes_down": 0,
}
"""The columns that every row has from the start."""

Metrics = Mapping[str, Any] | None
"""What Flower has of the clients' metrics."""
Row = dict[str, float]
"""The columns of one round."""


BEST = "best."
"""How the names of the tensors of `Best` begin in a checkpoint."""


class Journal:
    """One row for each round, which is filled while the round goes on.

    Row 0 is the initial model. What was not measured is missing in a row, and NaN in the trace.

    >>> journal = Journal()
    >>> journal.begin(1)
    >>> journal.trained(1, 0.5)
    >>> journal.evaluated(1, {"acc": 0.75, "f1": 0.7})
    >>> journal.rows[1]["test_accuracy"], journal.rows[1]["test_f1"]
    (0.75, 0.7)
    """

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {0: {**COUNTED, "round": 0, "seconds": 0.0}}
        self._began = time.perf_counter()

    def begin(self, k: int) -> None:
        """Begin the row of round k, and its time."""
        self._began = time.perf_counter()
        self.rows[k] = {**COUNTED, "round": k}

    def sent(self, k: int, messages: Iterable[Message]) -> None:
        """Count the bytes of messages to the clients."""
        self.rows[k]["bytes_down"] += sum(map(size, messages))

    def received(self, k: int, replies: Iterable[Message]) -> None:
        """Count the bytes of the clients' replies, whether they are used or not."""
        self.rows[k]["bytes_up"] += sum(map(size, replies))

    def trained(self, k: int, loss: float | None, **numbers: float) -> None:
        """Note the clients' loss in a round's training, and numbers that the server knows.

        The round's time ends here: evaluation does not count.
        """
        row = self.rows[k]
        row["train_loss"] = math.nan if loss is None else loss
        row["seconds"] = time.perf_counter() - self._began
        row |= numbers

    def evaluated(self, k: int, metrics: Metrics) -> None:
        """Note the metrics of the model after round k. Unknown ones become columns test_NAME."""
        found = _scalars(metrics)
        row = self.rows.setdefault(k, {**COUNTED, "round": k})
        for column, names in SYNONYMS.items():
            name = _first(names, found)
            if name:
                row[column] = found.pop(name)
        for name, value in found.items():
            column = f"test_{name}"
            # A user's metric must not take the place of a column that the package itself fills.
            if column not in COLUMNS:
                row[column] = value

    def has(self, k: int) -> bool:
        """Whether the model after round k was evaluated."""
        row = self.rows.get(k, {})
        return any(name.startswith("test_") for name in row)

    @property
    def trace(self) -> Trace:
        """The rows so far. The distance between evaluations is their greatest common divisor."""
        rounds = sorted(self.rows)
        evaluated = [k for k in rounds if self.has(k)]
        every = math.gcd(*evaluated) or max(1, rounds[-1])
        rows = [self.rows[k] for k in rounds]
        return Trace.from_rows(rows, every)

    def restore(self, k: int, path: Path) -> None:
        """Go on after round k with the rows of a file.

        The trace only tells what happened. So if the file cannot be read, a run goes on without
        it.
        """
        try:
            for number, row in _rows(Trace.load(path)):
                if number <= k:
                    self.rows[number] = row
        except InputError as error:
            log.warning("the rounds so far are missing in the trace: %s", error)


class Best(NamedTuple):
    """The best model so far, as far as evaluation tells.

    >>> best = Best().after(0.5, ArrayRecord()).after(0.4, ArrayRecord()).after(0.6, ArrayRecord())
    >>> best.lowest, best.worse
    (0.4, True)
    """

    arrays: ArrayRecord | None = None
    """The model with the lowest loss. None before the first loss."""
    lowest: float = inf
    """Its loss."""
    recent: tuple[float, ...] = ()
    """The losses that the next one is compared with, newest last."""
    worse: bool = False
    """Whether the newest is higher than all of these, by as much as the cautious guard notices."""
    central: bool = False
    """Whether these are losses on the server's rows. Then those on the clients' do not count."""

    def after(self, loss: float | None, arrays: ArrayRecord, central: bool = False) -> Self:
        """The same after a newer model, whose loss is None if it was not evaluated."""
        if central and not self.central:
            return type(self)(central=True).after(loss, arrays, central)
        if loss is None or central != self.central:
            return self._replace(worse=False)
        if not isfinite(loss):
            return self._replace(worse=True)
        highest = max(self.recent, default=inf)
        worse = loss > highest + NOTICED * abs(highest)
        newer = self._replace(recent=(*self.recent, loss)[-WINDOW:], worse=worse)
        return newer._replace(arrays=arrays, lowest=loss) if loss < self.lowest else newer

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a later process needs to go on, by name. Empty before the first loss."""
        if self.arrays is None:
            return {}
        found = {
            f"{BEST}lowest": torch.tensor(self.lowest, dtype=torch.float64),
            f"{BEST}recent": torch.tensor(self.recent, dtype=torch.float64),
            f"{BEST}central": torch.tensor(self.central),
        }
        for name, array in arrays_of(self.arrays).items():
            found[f"{BEST}array.{name}"] = torch.from_numpy(np.array(array))
        return found

    @classmethod
    def of(cls, names: Iterable[str], tensors: Mapping[str, Tensor]) -> Self:
        """What `tensors` was made of, for a model whose arrays have these names."""
        if f"{BEST}lowest" not in tensors:
            return cls()
        arrays = {name: Array(tensors[f"{BEST}array.{name}"].numpy()) for name in names}
        recent = tuple(tensors[f"{BEST}recent"].tolist())
        central = bool(tensors[f"{BEST}central"])
        return cls(ArrayRecord(arrays), float(tensors[f"{BEST}lowest"]), recent, central=central)


def _rows(trace: Trace) -> Iterator[tuple[int, Row]]:
    """The rows of a trace with their rounds, without what was not measured."""
    columns = [column.tolist() for column in trace.columns.values()]
    for values in zip(*columns, strict=True):
        row = {}
        for name, value in zip(trace.columns, values, strict=True):
            if not math.isnan(value):
                row[name] = value
        yield int(row["round"]), row


def tells_loss(metrics: Metrics) -> bool:
    """Whether the metrics of an evaluation hold a loss."""
    return bool(_first(SYNONYMS["test_loss"], _scalars(metrics)))


def size(message: Message) -> int:
    """The bytes of a message's records."""
    if not message.has_content():
        return 0
    records = message.content.values()
    return sum(record.count_bytes() for record in records)


def _first(names: Iterable[str], found: Mapping[str, float]) -> str:
    """The first of some names that was found. "" if none was."""
    for name in names:
        if name in found:
            return name
    return ""


def _scalars(metrics: Metrics) -> Row:
    """The metrics that are single numbers.

    Dashes in names become underscores, because the name of a column is a word. Flower's count of
    examples is left out.
    """
    if not isinstance(metrics, Mapping):
        return {}
    found = {}
    for name, value in metrics.items():
        word = name.replace("-", "_")
        is_wanted = word.isidentifier() and word != "num_examples"
        if is_wanted and isinstance(value, int | float):
            found[word] = float(value)
    return found
