"""The cells of a column as numbers: numbers, yes or no, categories, and the outcome.

A gap is NaN. Any other cell that does not fit raises an InputError: its message quotes the first
such cell and names its line, its `public` has the column and a count alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..errors import InputError
from .cells import NO, YES, is_date, is_gap, number, same, yes_or_no
from .questions import Array
from .schema import DATES, Column, Schema, wrong

BINOMIAL = "binomial"
GAUSSIAN = "gaussian"
POISSON = "poisson"
COX = "cox"
FAMILIES = (BINOMIAL, GAUSSIAN, POISSON, COX)

ROLE = "the outcome"


@dataclass(frozen=True)
class Cells:
    """The cells of one column of a table."""

    name: str
    texts: Sequence[str]
    marks: Sequence[str] = ()
    """Texts of a gap beside the usual ones."""
    where: str = "the table"
    lines: Sequence[int] = ()
    """The line of each cell in its file, if there is a file."""

    def convert(
        self,
        meaning: Callable[[str], float | None],
        expected: str,
        role: str = "",
    ) -> Array:
        """The cells as numbers [rows], NaN for gaps.

        Args:
            meaning: The number that a cell stands for. None if it stands for none.
            expected: What a cell ought to be, for the error: "numbers such as -1.5".
            role: What the column is to the regression, for the error: "the outcome".
        """
        values = np.full(len(self.texts), np.nan)
        known: dict[str, float] = {}
        misfits: list[int] = []
        for row, text in enumerate(self.texts):
            if text not in known:
                found = np.nan if is_gap(text, self.marks) else meaning(text)
                if found is None:
                    misfits.append(row)
                    continue
                known[text] = found
            values[row] = known[text]
        if misfits:
            raise self._error(misfits, expected, role)
        return values

    def _error(self, misfits: Sequence[int], expected: str, role: str) -> InputError:
        """The error for cells that do not fit. `misfits` are their rows."""
        first = misfits[0]
        text = self.texts[first]
        line = f"line {self.lines[first]}" if self.lines else f"row {first + 1}"
        column = f"column {self.name!r}" + (f", {role}" if role else "")
        count = len(misfits)
        remedy = DATES if is_date(text) else ""
        return InputError(
            f"{self.where}: {line}: has {text!r} in {column}, expected {expected}, or a gap such "
            f"as NA ({count} such cells){remedy}",
            public=f"{column}: {count} of {len(self.texts)} cells are not {expected}, nor gaps",
        )


def read_number(cells: Cells, role: str = "") -> Array:
    """The numbers of a column [rows]."""
    return cells.convert(number, "numbers such as -1.5", role)


def read_yesno(cells: Cells, column: Column) -> Array:
    """1 for yes and 0 for no, [rows, 1], as the column writes them or in one of the usual ways."""
    if not column.levels:
        return cells.convert(yes_or_no, "yes or no")[:, None]
    no, yes = column.levels
    return cells.convert(either(yes, no), f"{no!r} or {yes!r}")[:, None]


def either(yes: str, no: str) -> Callable[[str], float | None]:
    """The meaning of a cell that has one of two texts: 1 for `yes`, 0 for `no`."""

    def meaning(cell: str) -> float | None:
        if same(cell, yes):
            return 1.0
        return 0.0 if same(cell, no) else None

    return meaning


def read_category(cells: Cells, column: Column) -> Array:
    """A column of 0 and 1 for each level but the reference, [rows, levels - 1]."""
    levels = column.levels

    def place(cell: str) -> float | None:
        return next((float(i) for i, level in enumerate(levels) if same(cell, level)), None)

    listed = ", ".join(levels)
    found = cells.convert(place, f"levels of the schema ({listed})")
    numbers = [float(levels.index(level)) for level in column.compared]
    chosen: Array = (found[:, None] == np.array(numbers)).astype(np.float64)
    chosen[np.isnan(found)] = np.nan
    return chosen


# ---- what a regression explains ----


class Outcome(NamedTuple):
    """One number for each row [rows]. NaN is a gap."""

    y: Array
    time: Array
    """1 where a family has no time."""
    weights: Array
    offset: Array

    @property
    def together(self) -> Array:
        """All of them side by side [rows, 4]."""
        return np.column_stack(self)


def read_outcome(find: Callable[[str], Cells], schema: Schema, family: str) -> Outcome:
    """Read the outcome, and what belongs to it, as one of FAMILIES needs it.

    `find` gives the cells of a column by its name.
    """
    if family == COX and not schema.time:
        raise wrong(
            'survival needs the column of the time at risk: write time = "days" into the schema '
            "(--time)"
        )
    cells = find(schema.outcome)
    if family == GAUSSIAN:
        y = read_number(cells, ROLE)
    elif family == POISSON:
        y = cells.convert(count, "counts such as 0, 1, 2", ROLE)
    else:
        y = read_events(cells, schema)
    ones = np.ones(len(y))
    time = weights = ones
    if family == COX:
        time = find(schema.time).convert(positive, "times above 0", "the time at risk")
    if schema.weights:
        weights = find(schema.weights).convert(positive, "weights above 0", "the weights")
    offset = np.zeros(len(y))
    if schema.offset:
        offset = read_number(find(schema.offset), "the offset")
    return Outcome(y, time, weights, offset)


def count(cell: str) -> float | None:
    """A whole number from 0 on. None for any other text."""
    value = number(cell)
    return value if value is not None and value >= 0 and value % 1 == 0 else None


def positive(cell: str) -> float | None:
    """A number above 0. None for any other text."""
    value = number(cell)
    return value if value is not None and value > 0 else None


def read_events(cells: Cells, schema: Schema) -> Array:
    """1 for an event and 0 for none, [rows]."""
    meaning = _meaning(cells, schema)
    if not schema.positive:
        expected = "0 or 1, yes or no (or name the level of an event: positive = ... in the schema)"
    elif schema.negative:
        expected = f"{schema.positive!r} or {schema.negative!r}"
    else:
        expected = f"{schema.positive!r} or one other level"
    return cells.convert(meaning, expected, ROLE)


def _meaning(cells: Cells, schema: Schema) -> Callable[[str], float | None]:
    """What a cell of the outcome means: an event, none, or neither."""
    event = schema.positive
    if not event:
        return yes_or_no
    if schema.negative:
        return either(event, schema.negative)
    small = event.lower()
    if small in YES:
        return yes_or_no
    if small in NO:
        return _turned
    return either(event, _other(cells, event))


def _turned(cell: str) -> float | None:
    """1 for no and 0 for yes: the meaning of an outcome whose event is "no"."""
    value = yes_or_no(cell)
    return None if value is None else 1 - value


def _other(cells: Cells, event: str) -> str:
    """The first text of a column that is neither a gap nor the event, "" if there is none."""
    for text in cells.texts:
        if not is_gap(text, cells.marks) and not same(text, event):
            return text
    return ""
