"""What a run leaves behind: one row per round, with metrics, curvature diagnostics, bytes and
seconds.

A row describes its own round; round 0 is the initial model. `train_loss` is the running mean of the
round's mini-batch losses, `bytes_up` and `bytes_down` are summed over the cohort, `seconds` is wall
time. Rounds that were not evaluated hold NaN in the metrics. So does everything that is measured
from the round of divergence on, but for the accuracy: it is 0 there, if the run had one before.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, integer, number, unknown
from ..support.files import write_atomic
from ..support.intake import read_text

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = (
    *("trial", "seed", "round"),
    *("train_loss", "test_loss", "test_accuracy", "grad_norm", "ys"),
    *("overridden", "skipped", "radius", "bytes_up", "bytes_down", "seconds"),
)
INT64 = 2**63 - 1
WORSE = 1.1  # a loss this many times the first is worth a word
INTEGERS = frozenset({"trial", "seed", "round", "overridden", "skipped", "bytes_up", "bytes_down"})
COUNTS = ("round", "bytes_up", "bytes_down")
ACCURACY = "test_accuracy"
LOSS = "test_loss"
LAST = 10  # evaluations whose mean is the value at the end, at most


@dataclass(frozen=True, eq=False)
class Trace:
    """The rows of one run (one trial, one seed) as columns.

    A round is evaluated when it is a multiple of `eval_every`, or the last. `diverged` is the
    round in which the run left the finite numbers.

    `trace["test_accuracy"]` is a column as an array, `len(trace)` the number of rows. The columns
    of `COLUMNS` are always there; further metrics and diagnostics of an algorithm follow them.

    >>> trace = Trace.from_rows([
    ...     {"trial": 0, "seed": 0, "round": k, "test_accuracy": a, "overridden": 0, "skipped": 0,
    ...      "bytes_up": 8, "bytes_down": 8}
    ...     for k, a in enumerate([0.1, 0.6, 0.8])
    ... ])
    >>> trace.rounds_to(0.5), trace.final(), trace.bytes_to(0.5)
    (1, 0.8, 32)
    """

    columns: Mapping[str, NDArray[Any]]
    eval_every: int = 1
    diverged: int | None = None

    def __post_init__(self) -> None:
        """Check that the columns fit together, whoever made them."""
        integer("eval_every", self.eval_every, 1, INT64)
        _check(self.columns)

    def __len__(self) -> int:
        """The number of rows: the rounds, and one for the initial model."""
        return len(self.columns["round"])

    def __getitem__(self, name: str) -> NDArray[Any]:
        """A column by name; an unknown name is an InputError that lists those that are there."""
        if name not in self.columns:
            raise unknown("column", name, self.columns)
        return self.columns[name]

    @classmethod
    def from_rows(
        cls, rows: Sequence[Mapping[str, float]], eval_every: int = 1, diverged: int | None = None
    ) -> Trace:
        """A trace of rows; a measurement that a row leaves out is NaN."""
        names = dict.fromkeys((*COLUMNS, *(name for row in rows for name in row)))
        return cls({name: _column(name, rows) for name in names}, eval_every, diverged)

    def to_csv(self) -> str:
        """CSV text; every number is written so that reading it gives back the same bits."""
        lines = zip(*(column.tolist() for column in self.columns.values()), strict=True)
        return "".join(",".join(map(str, line)) + "\n" for line in (tuple(self.columns), *lines))

    def save(self, path: str | Path) -> None:
        """Write the trace as a CSV file, whole or not at all."""
        write_atomic(path, self.to_csv())

    @classmethod
    def load(cls, path: str | Path, eval_every: int = 1, diverged: int | None = None) -> Trace:
        """Read what `save` wrote.

        Args:
            path: The file.
            eval_every: How often the run was evaluated. This and `diverged` are settings of the
                run, which lie elsewhere.
            diverged: The round in which it diverged, or None.
        """
        return cls.from_csv(read_text(path), path, eval_every, diverged)

    @classmethod
    def from_csv(
        cls, text: str, path: str | Path, eval_every: int = 1, diverged: int | None = None
    ) -> Trace:
        """The trace of a CSV text; the path is for the message of an error."""
        try:
            return cls(_parse(text), eval_every, diverged)
        except InputError as error:
            raise InputError(f"cannot read {path} as a trace: {error}") from error

    def to_pandas(self) -> pd.DataFrame:
        """The columns as a data frame, a row for each round."""
        import pandas as pd

        return pd.DataFrame(dict(self.columns))

    def evaluations(self, metric: str = "test_accuracy") -> tuple[NDArray[Any], NDArray[Any]]:
        """The evaluated rounds and the metric's values there.

        Args:
            metric: The column. After divergence the accuracy, where the run had one, is 0, and
                other metrics are NaN.

        Returns:
            Two arrays of the same length.
        """
        rounds = self["round"]
        evaluated = (rounds % self.eval_every == 0) | (rounds == rounds.max(initial=0))
        return rounds[evaluated], self[metric][evaluated]

    @property
    def has_accuracy(self) -> bool:
        """Whether the run was evaluated by its accuracy: there is none for real targets.

        Only the rounds before divergence tell. After it the accuracy is 0 or, in traces of earlier
        versions, 0 even where there was none before.
        """
        values = self[ACCURACY]
        if self.diverged is not None:
            values = values[self["round"] < self.diverged]
        return bool((~np.isnan(values)).any())

    def rounds_to(self, target: float, metric: str = "test_accuracy") -> int | None:
        """The first evaluated round that reaches the target."""
        rounds, values = self.evaluations(metric)
        return next(iter(rounds[values >= target].tolist()), None)

    def last_below(self, target: float, metric: str = "test_accuracy") -> int | None:
        """The last evaluated round below the target: how the paper counts.

        Returns:
            The round; -1 if there is none, None if the run ends below the target.
        """
        rounds, values = self.evaluations(metric)
        reached = values >= target  # False for NaN: a diverged run is below
        if not len(rounds) or not reached[-1]:
            return None
        return int(rounds[~reached].max(initial=-1))

    def final(self, metric: str = "test_accuracy", last: int = 1) -> float:
        """The mean of the last evaluations.

        After divergence the accuracy, where the run had one, is 0, and everything else is NaN.

        Args:
            metric: The column.
            last: How many evaluations to average over.
        """
        if last < 1:
            raise InputError(f"last must be >= 1, got {last}")
        values = self.evaluations(metric)[1][-last:]
        return float(values.mean()) if len(values) else float("nan")

    def worse_than_start(self) -> str | None:
        """A sentence for who should know that a run has ended, undiverged, with a larger loss than
        it began with.

        By a tenth at least, and both losses where both are known: a test loss alone grows where a
        good fit is overdone.
        """
        ends = {name: _ends(self[name]) for name in ("train_loss", "test_loss")}
        known = {name: pair for name, pair in ends.items() if pair is not None}
        if (
            self.diverged is not None
            or not known
            or not all(last > WORSE * first for first, last in known.values())
        ):
            return None
        name, (first, last) = list(known.items())[-1]
        shown = f"{name.replace('_', ' ')} {first:.3g} -> {last:.3g}"
        return (
            f"ended worse than it began: {shown}; standardise the columns, or use a smaller "
            "step size"
        )

    def bytes_to(self, target: float, metric: str = "test_accuracy") -> int | None:
        """Bytes of the whole federation, both ways, to the end of the first round that reaches the
        target."""
        hit = self.rounds_to(target, metric)
        if hit is None:
            return None
        spent = self["round"] <= hit
        return int(self["bytes_up"][spent].sum() + self["bytes_down"][spent].sum())


def accuracies(targets: float | Iterable[float]) -> list[float]:
    """Target accuracies as a list; one number stands for itself.

    Raises:
        InputError: One of them is no number in (0, 1], such as 90 where per cent were meant.

    >>> accuracies(0.9)
    [0.9]
    """
    # The room `report` imports this one, so it can only be imported when it is needed.
    from ..report.page.content import check_targets

    several = targets if isinstance(targets, Iterable) else [targets]
    found = [number("target", target) for target in several]
    check_targets(found)
    return found


def check_accuracy(target: float, metric: str) -> None:
    """Refuse a target that no accuracy can reach; other metrics may have any values."""
    if metric == ACCURACY:
        accuracies([target])


def at_end(trace: Trace, rounds: int | None = None, metric: str = ACCURACY) -> float:
    """A metric at the end of a run: the final accuracy of every table, and what sweeps choose by.

    It is the mean of the last ten evaluations, or of the last quarter if there are fewer than
    forty: a single evaluation goes up and down with the last cohort. A run that stopped early has
    reached its goal: its last evaluation counts. After divergence the accuracy is 0 where the run
    had one before; every other metric is not a number.

    Args:
        trace: The run's trace.
        rounds: The rounds that the run was to have, which tells a run that stopped early. None
            takes the trace for a whole run.
        metric: A column of the trace.
    """
    if trace.diverged is not None:
        return 0.0 if metric == ACCURACY and trace.has_accuracy else float("nan")
    # A whole trace has a row for round 0 as well, so it is longer than the rounds.
    if rounds is not None and len(trace) <= rounds:
        return trace.final(metric)
    evaluations = len(trace.evaluations(metric)[0])
    return trace.final(metric, last=max(1, min(LAST, evaluations // 4)))


def _ends(values: NDArray[Any]) -> tuple[float, float] | None:
    """The first and the last of several numbers, NaN left out; None where there are not two."""
    known = values[~np.isnan(values)]
    return (float(known[0]), float(known[-1])) if len(known) > 1 else None


def _check(columns: Mapping[str, NDArray[Any]]) -> None:
    """Refuse columns that cannot be those of one run.

    All columns are there and equally long, counts are not negative, and rounds ascend.
    """
    missing = [name for name in COLUMNS if name not in columns]
    if missing:
        raise InputError(
            f"a trace needs the columns {', '.join(missing)}; build it with Trace.from_rows"
        )
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise InputError(f"a trace's columns must be equally long, got {lengths}")
    spent = [sum(columns[name].tolist()) for name in ("bytes_up", "bytes_down")]
    if min(min(columns[name], default=0) for name in COUNTS) < 0 or sum(spent) > INT64:
        raise InputError(
            f"{', '.join(COUNTS)} must be >= 0, and all bytes together at most 2^63 - 1"
        )
    for row, (before, after) in enumerate(pairwise(columns["round"].tolist()), 2):
        if after <= before:
            raise InputError(
                f"row {row}: round {after} follows round {before}; a trace is one run, in order"
            )


def _column(name: str, rows: Iterable[Mapping[str, float]]) -> NDArray[Any]:
    """One column of several rows: integers must be there, other measurements may be left out."""
    if name not in INTEGERS:
        return np.array([row.get(name, np.nan) for row in rows], dtype=np.float64)
    try:
        return np.array([row[name] for row in rows], dtype=np.int64)
    except (KeyError, ValueError, OverflowError) as error:
        raise InputError(f"every row of a trace needs a 64-bit integer {name}") from error


def _parse(text: str) -> dict[str, NDArray[Any]]:
    """The columns of a CSV text without quotes, which no trace needs."""
    header, *lines = text.splitlines() or [""]
    names = header.split(",")
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise InputError(f"line 1: the column {missing[0]} is missing")
    if len(set(names)) < len(names):
        raise InputError("line 1: a column is there twice")
    if not text.endswith("\n"):
        raise InputError(f"line {len(lines) + 1}: the file is truncated")
    columns = {name: array("q" if name in INTEGERS else "d") for name in names}
    for place, line in enumerate(lines, 2):
        _parse_line(place, line, columns)
    return {name: np.array(columns[name]) for name in dict.fromkeys((*COLUMNS, *names))}


def _parse_line(number: int, line: str, columns: Mapping[str, array[Any]]) -> None:
    """Append the fields of one line to the columns; an error names the line and the column."""
    fields = line.split(",")
    if len(fields) != len(columns):
        raise InputError(f"line {number}: {len(fields)} values for {len(columns)} columns")
    for (name, column), field in zip(columns.items(), fields, strict=True):
        try:
            column.append(int(field) if name in INTEGERS else float(field))
        except (ValueError, OverflowError):
            kind = "a 64-bit integer" if name in INTEGERS else "a number"
            raise InputError(f"line {number}: {name} must be {kind}, got {field[:40]!r}") from None
