"""What a regression explains: the outcome of every row, its time at risk, weight and offset."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .cells import NO, YES, is_gap, number, same, yes_or_no
from .questions import Array
from .reading import Cells, either, read_number
from .schema import Schema, wrong

BINOMIAL = "binomial"
GAUSSIAN = "gaussian"
POISSON = "poisson"
COX = "cox"
FAMILIES = (BINOMIAL, GAUSSIAN, POISSON, COX)

ROLE = "the outcome"
RECODE = "recode the outcome to two levels, or choose another family"
"""What to do about an outcome of three levels."""


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
    check_time(schema, family)
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


def check_time(schema: Schema, family: str) -> None:
    """Raise InputError if survival data would have no time."""
    if family == COX and not schema.time:
        raise wrong(
            "survival needs the column of the time at risk: name it with --time, or write "
            'time = "days" into the schema'
        )


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
    return cells.convert(meaning, expected, ROLE, RECODE, guessed=bool(schema.positive))


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
