"""A hospital's table as numbers: the design of a regression, by the schema that all share.

    table = read_table("north.csv")
    made = design(table, schema, "binomial")
    made.x, made.y

Cells stay text until the schema says what they mean. An error quotes the cell, for whoever holds
the table; its `public` has the column and a count alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import InputError, one_of, unknown
from ..support.intake import PathLike, limits, user_path
from ..support.records import Record, open_table
from .cells import is_gap, number
from .outcome import COX, FAMILIES, GAUSSIAN, read_outcome
from .questions import Array
from .reading import Cells, read_category, read_number, read_yesno, refuse_far
from .schema import CATEGORY, IGNORE, MEDIAN, NUMBER, Column, Schema, check, wrong

INTERCEPT = "(intercept)"
MISSING = "missing"
"""The level of a term that tells of gaps."""


class Table(NamedTuple):
    """A table whose cells are text."""

    names: tuple[str, ...]
    """Of the columns, in the order of the table."""
    rows: list[list[str]]
    """The cells of each row, without blanks around them."""
    where: str = "the table"
    """The file, for messages."""
    lines: tuple[int, ...] = ()
    """The line of the file that each row stands in, if there is a file."""
    levels: Mapping[str, Sequence[str]] = {}
    """The levels, in their order, of the columns that have an order of their own."""


class Term(NamedTuple):
    """What one column of the design stands for."""

    name: str
    """As the table of coefficients has it: "age", "stage: II", "smoker: yes", "(intercept)"."""
    column: str
    """The column of the table. Empty for the intercept."""
    level: str = ""
    """Of a category: the level. Of a gap's indicator: "missing"."""
    unit: str = ""
    scaled: bool = False
    """Whether the fit subtracts the federation's mean and divides by its deviation."""


class Design(NamedTuple):
    """The rows that a regression uses, n of them, with p columns."""

    terms: tuple[Term, ...]
    """What the p columns stand for."""
    x: Array
    """[n, p], in the units of the table; the intercept, if there is one, is the first column."""
    y: Array
    """The outcome [n]: 0 or 1, a count, a number, or whether the event was seen."""
    time: Array
    """The time at risk [n] of survival data, else empty."""
    weights: Array
    """[n], 1 where none are given."""
    offset: Array
    """[n], 0 where none are given."""
    dropped: int = 0
    """Rows left out because of a gap."""
    notes: tuple[str, ...] = ()
    """Sentences for the hospital's own log, such as which columns were ignored."""
    kept: Sequence[int] = ()
    """The rows of the table [n], counted from 0."""


# ---- reading a table ----


def read_table(path: PathLike, column: str = "") -> Table:
    """Read a CSV file in UTF-8. The first line has the names.

    Args:
        path: The file, which may be packed.
        column: A name that the table should have. It helps where names have commas in them.

    Raises:
        InputError: The file cannot be read, is empty, or a row has more or fewer cells than the
            header.
    """
    place = user_path("table", path)
    header, records = open_table(place, column)
    width = len(header.cells)
    if column not in header.cells and _looks_like_data(header.cells):
        raise InputError(
            f"{place}: the first line looks like data; the file needs a line with the columns' "
            f"names",
            public="the first line of the table looks like data, expected the columns' names",
        )
    most = limits()
    rows: list[list[str]] = []
    lines: list[int] = []
    for line, cells in records:
        if len(cells) != width:
            raise _ragged(place, Record(line, cells), width)
        most.check("cells", width * (len(rows) + 1), place, "cells up to here")
        rows.append(cells)
        lines.append(line)
    return Table(tuple(header.cells), rows, str(place), tuple(lines))


def _looks_like_data(cells: Sequence[str]) -> bool:
    """Whether all cells of a line are numbers or gaps, and at least one is a number."""
    others = [cell for cell in cells if not is_gap(cell)]
    return bool(others) and all(number(cell) is not None for cell in others)


def _ragged(path: Path, record: Record, width: int) -> InputError:
    """The error for a row that has more or fewer cells than the header."""
    count = len(record.cells)
    return InputError(
        f"{path}: line {record.line}: has {count} cells, expected {width}: one for each column",
        public=f"at least 1 row has {count} cells, expected {width}",
    )


# ---- terms ----


def terms(schema: Schema, family_name: str) -> tuple[Term, ...]:
    """What the columns of the design stand for. All hospitals have the same, by the schema alone.

    So a level, or a gap, that no hospital has is a column of zeros everywhere: whoever fits knows
    that from the sums of all hospitals.

    >>> ages = Schema("ill", (Column("age", "number", unit="years"),))
    >>> [term.name for term in terms(ages, "binomial")]
    ['(intercept)', 'age']
    """
    check(schema)
    found: list[Term] = []
    if schema.intercept and _family(family_name) != COX:
        found.append(Term(INTERCEPT, ""))
    for column in schema.columns:
        found += _terms_of(column, schema.missing)
    counts = Counter(term.name for term in found)
    for name, count in counts.items():
        if count > 1:
            raise wrong(f"{count} coefficients would be called {name!r}: rename a column")
    return tuple(found)


def _family(name: str) -> str:
    """The family in its name with settings: "cox" of "cox efron"."""
    return one_of("family", name.partition(" ")[0], FAMILIES)


def _terms_of(column: Column, missing: str) -> list[Term]:
    """The terms of one column of the table, none if it is to be ignored."""
    if column.type == IGNORE:
        return []
    found = []
    if column.type == NUMBER:
        name = column.name if column.per == 1 else f"{column.name} (per {column.per:g})"
        found.append(Term(name, column.name, unit=column.unit, scaled=column.scale))
    else:
        found += [_level(column, level) for level in column.compared]
    if missing == MEDIAN and column.gaps:
        found.append(_level(column, MISSING))
    return found


def _level(column: Column, level: str) -> Term:
    """The term of one level of a column."""
    return Term(f"{column.name}: {level}", column.name, level)


# ---- the design ----


def design(table: Table, schema: Schema, family_name: str) -> Design:
    """The numbers of a table, as a regression takes them.

    Args:
        table: The table. The order of its columns does not matter, and columns that the schema
            does not have are ignored, with a note.
        schema: What the columns mean.
        family_name: Its first word decides what the outcome may be: "binomial" yes or no, or two
            levels; "gaussian" a number; "poisson" a count; "cox" whether the event was seen, beside
            a time at risk.

    Raises:
        InputError: The table lacks a column, or has a cell that the schema does not allow. The
            message quotes the first such cell; `public` says the column and how many there are.
    """
    family = _family(family_name)
    made = terms(schema, family_name)
    x = explanatory(table, schema, family_name)
    find = partial(cells_of, table, marks=schema.marks)
    outcome = read_outcome(find, schema, family)
    for term, values in zip(made, x.T, strict=True):
        if term.column and not term.level:
            refuse_far(find(term.column), values)
    if family == GAUSSIAN:
        refuse_far(find(schema.outcome), outcome.y)
    gaps = np.isnan(np.hstack([x, outcome.together]))
    kept = np.flatnonzero(~gaps.any(axis=1))
    dropped = len(x) - len(kept)
    return Design(
        made,
        x[kept],
        outcome.y[kept],
        outcome.time[kept] if family == COX else np.zeros(0),
        outcome.weights[kept],
        outcome.offset[kept],
        dropped,
        tuple(_notes(table, schema, dropped)),
        kept.tolist(),
    )


def explanatory(table: Table, schema: Schema, family_name: str) -> Array:
    """The columns that explain, [rows, terms], for all rows of a table: no outcome is needed.

    A row that the rule for gaps would leave out has NaN.
    """
    rows = len(table.rows)
    parts = [np.zeros((rows, 0))]
    if schema.intercept and _family(family_name) != COX:
        parts.append(np.ones((rows, 1)))
    for column in schema.columns:
        if column.type != IGNORE:
            cells = cells_of(table, column.name, schema.marks)
            parts.append(_numbers(cells, column, schema.missing))
    return np.hstack(parts)


def offsets(table: Table, schema: Schema) -> Array:
    """What is added to the linear predictor of each row of a table, [rows]. NaN is a gap."""
    if not schema.offset:
        return np.zeros(len(table.rows))
    return read_number(cells_of(table, schema.offset, schema.marks), "the offset")


def _numbers(cells: Cells, column: Column, missing: str) -> Array:
    """The columns of the design [rows, terms] of one column of the table, NaN where rows go."""
    if column.type == NUMBER:
        values = read_number(cells)[:, None] / column.per
        fill = None if column.fill is None else column.fill / column.per
    else:
        reader = read_category if column.type == CATEGORY else read_yesno
        values = reader(cells, column)
        fill = 0.0
    if missing != MEDIAN or not column.gaps or fill is None:
        return values
    gap = np.isnan(values).any(1, keepdims=True)
    return np.hstack([np.where(gap, fill, values), gap])


def cells_of(table: Table, name: str, marks: Sequence[str] = ()) -> Cells:
    """The cells of a column. InputError if the table lacks it, or has it twice.

    `marks` are texts of a gap beside the usual ones.
    """
    count = table.names.count(name)
    if not count:
        meant = unknown("column", name, table.names)
        raise InputError(
            f"{table.where}: lacks a column of the schema: {meant}",
            public=f"the table has no column {name!r}",
        )
    if count > 1:
        raise InputError(
            f"{table.where}: {count} columns are called {name!r}, expected one: rename them",
            public=f"the table has {count} columns {name!r}, expected one",
        )
    place = table.names.index(name)
    texts = [row[place] for row in table.rows]
    return Cells(name, texts, marks, table.where, table.lines)


def _notes(table: Table, schema: Schema, dropped: int) -> Iterable[str]:
    """Sentences for the hospital's own log."""
    known = {schema.outcome, schema.time, schema.weights, schema.offset}
    known.update(column.name for column in schema.columns)
    extra = [name for name in table.names if name not in known]
    if extra:
        listed = ", ".join(extra)
        yield f"{table.where}: columns that the schema does not have are ignored: {listed}"
    if dropped:
        yield (
            f"{table.where}: {dropped} of {len(table.rows)} rows are left out because of "
            "missing values"
        )
