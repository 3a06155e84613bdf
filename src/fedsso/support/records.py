"""The header and the rows of a CSV table, separated by commas or semicolons.

    age;dose, in mg;ill
    50;1,5;yes

Blanks around cells are removed. Where semicolons separate the cells, a comma within a number is a
decimal point.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import tee
from pathlib import Path
from typing import NamedTuple

from ..errors import InputError
from .intake import csv_rows, text_lines

DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+([eE][+-]?\d+)?")


class Record(NamedTuple):
    """One row of a file: the number of its line, and its cells."""

    line: int
    cells: list[str]


def open_table(path: Path, column: str = "") -> tuple[Record, Iterator[Record]]:
    """Open a table. Returns its header, and its rows as an iterator.

    Args:
        path: The file, which may be packed.
        column: A name that the header should have, which helps to find out what separates the
            cells.

    Raises:
        InputError: The file is empty, or cannot be read.
    """
    # The first line that is not blank is looked at twice: it decides what separates the cells, and
    # it is the header.
    begin, rest = tee(text_lines(path))
    first = next((line for line in begin if line.strip()), "")
    del begin  # otherwise `tee` would keep every line for it
    records = read_records(path, rest, delimiter(first, column))
    header = next(records, None)
    if header is None:
        raise InputError(
            f"{path}: the file is empty, need a line with the names of the columns",
            public="the table is an empty file, without a line of names",
        )
    return header, records


def read_records(path: Path, text: Iterable[str], separator: str) -> Iterator[Record]:
    """The rows of the lines of a file, without empty lines."""
    for line, cells in csv_rows(path, text, separator):
        stripped = [cell.strip() for cell in cells]
        if separator == ";":
            stripped = [_with_point(cell) for cell in stripped]
        yield Record(line, stripped)


def _with_point(cell: str) -> str:
    """1,5 as 1.5. Other texts stay as they are.

    >>> _with_point("1,5"), _with_point("a,b")
    ('1.5', 'a,b')
    """
    if DECIMAL_COMMA.fullmatch(cell):
        return cell.replace(",", ".")
    return cell


def delimiter(first: str, column: str = "") -> str:
    """Decide between comma and semicolon by the first line of a file.

    It is the one that shows the given name as a column, else the one that makes more columns. With
    as many of both, commas are more likely to stand within a name than semicolons.

    >>> delimiter("age;dose, in mg;ill", "ill"), delimiter("dose, in mg;ill")
    (';', ';')
    """
    best = ","
    best_score = (False, 1)
    for separator in ",;":
        names = [name.strip(' "\r\n') for name in first.split(separator)]
        score = (column in names, len(names))
        if score >= best_score and len(names) > 1:
            best = separator
            best_score = score
    return best
