"""The cells of one column as numbers: numbers, yes or no, categories.

A gap is NaN. Any other cell that does not fit raises an InputError: its message quotes the first
such cell and names its line, its `public` has the column and a count alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import InputError
from ..support.records import DECIMAL_COMMA
from .cells import LARGEST, is_date, is_gap, is_too_large, number, same, yes_or_no
from .questions import Array
from .schema import DATES, Column

COMMAS = "decimal commas: use points, or semicolons between cells"
"""What to do about numbers such as 1,5 in a table with commas between cells."""
HUGE = 1e15
"""No number that somebody measured is larger."""
FAR = 1e8
"""Usual distances from the median. A number that is farther off is all that a fit would see."""


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
        remedy: str = "",
        *,
        guessed: bool = False,
    ) -> Array:
        """The cells as numbers [rows], NaN for gaps.

        Args:
            meaning: The number that a cell stands for. None if it stands for none.
            expected: What a cell ought to be, for the error: "numbers such as -1.5".
            role: What the column is to the regression, for the error: "the outcome".
            remedy: What to do about other cells, for the error.
            guessed: Whether the schema says which texts may occur. The count of the others would
                tell whoever guesses a name whether it occurs, so it stays with the hospital.
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
            raise self._error(misfits, expected, role, remedy, guessed)
        return values

    def _error(
        self,
        misfits: Sequence[int],
        expected: str,
        role: str,
        remedy: str,
        guessed: bool,
    ) -> InputError:
        """The error for cells that do not fit. `misfits` are their rows."""
        first = misfits[0]
        text = self.texts[first]
        column = f"column {self.name!r}" + (f", {role}" if role else "")
        count = len(misfits)
        place = f"{self.where}: {self.line(first)}"
        advice = f"; {remedy}" if remedy else ""
        own = DATES if is_date(text) else ""
        if DECIMAL_COMMA.fullmatch(text):
            own = f"; {COMMAS}"
        large = sum(is_too_large(self.texts[row]) for row in misfits)
        told = "some" if guessed else f"{count} of {len(self.texts)}"
        beyond = f"; {large} of them too large, beyond {LARGEST:g}" if large else ""
        return InputError(
            f"{place}: has {text!r} in {column}, expected {expected}, or a missing value such "
            "as NA ("
            f"{count} such cells){beyond}{own}{advice}",
            public=f"{column}: {told} cells are not {expected}, nor missing values{beyond}{advice}",
        )

    def line(self, row: int) -> str:
        """Where a row stands, for messages to who holds the table."""
        return f"line {self.lines[row]}" if self.lines else f"row {row + 1}"


def read_number(cells: Cells, role: str = "") -> Array:
    """The numbers of a column [rows]."""
    return cells.convert(number, "numbers such as -1.5", role)


def refuse_far(cells: Cells, values: Array) -> None:
    """Raise InputError for numbers [rows] so far from all others that they must be mistakes.

    A deviation would grow with the number itself, so the usual distance is a median.
    """
    known = values[~np.isnan(values)]
    if not len(known):
        return
    away = np.abs(values - np.median(known))
    usual = np.median(away[away > 0]) if (away > 0).any() else 0.0
    rows = np.flatnonzero((np.abs(values) > HUGE) | (away > FAR * usual))
    if not len(rows):
        return
    first = int(rows[0])
    count = f"{len(rows)} of {len(known)} numbers"
    rule = f"too large: beyond {HUGE:g}, or {FAR:g} times as far from the median as others"
    raise InputError(
        f"{cells.where}: {cells.line(first)}: has {cells.texts[first]!r} in column {cells.name!r}; "
        f"{count} are {rule}; correct them, or mark them as missing, such as NA",
        public=f"column {cells.name!r}: {count} are {rule}",
    )


def read_yesno(cells: Cells, column: Column) -> Array:
    """1 for yes and 0 for no, [rows, 1], as the column writes them or in one of the usual ways."""
    if not column.levels:
        return cells.convert(yes_or_no, "yes or no")[:, None]
    no, yes = column.levels
    return cells.convert(either(yes, no), f"{no!r} or {yes!r}", guessed=True)[:, None]


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
    found = cells.convert(place, f"levels of the schema ({listed})", guessed=True)
    numbers = [float(levels.index(level)) for level in column.compared]
    chosen: Array = (found[:, None] == np.array(numbers)).astype(np.float64)
    chosen[np.isnan(found)] = np.nan
    return chosen
