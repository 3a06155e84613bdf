"""The header and the rows of a CSV table, separated by commas, semicolons or tabs.

    age;dose, in mg;ill
    50;1,5;yes

Blanks around cells are removed, and a letter with its marks is one character (NFC). Where
semicolons separate the cells, a comma within a number is a decimal point.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import tee
from pathlib import Path
from typing import NamedTuple

from ..errors import InputError
from .intake import composed, csv_rows, text_lines

DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+([eE][+-]?\d+)?")
DECIMAL = re.compile(r"[+-]?\d*([,.])\d+([eE][+-]?\d+)?")
SEPARATOR = re.compile(r'"?sep=([,;\t])"?\s*')
"""The first line that Excel writes and reads: what separates the cells of the others."""


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
        InputError: The file is empty, cannot be read, or has decimal commas and decimal points.
    """
    # The first line that is not blank is looked at twice: it decides what separates the cells, and
    # it is the header.
    begin, rest = tee(map(composed, text_lines(path)))
    first = next((line for line in begin if line.strip()), "")
    del begin  # otherwise `tee` would keep every line for it
    told = SEPARATOR.fullmatch(first)
    separator = told[1] if told else delimiter(first, column)
    records = read_records(path, rest, separator)
    if told:
        next(records)
    header = next(records, None)
    if header is None:
        raise InputError(
            f"{path}: the file is empty, need a line with the names of the columns",
            public="the table is an empty file, without a line of names",
        )
    if separator == ";":
        records = _with_points(path, header, records)
    return header, records


def column_names(given: str | Iterable[str]) -> list[str]:
    """The names of columns: a list, or a text with commas between them.

    >>> column_names("sex, dx"), column_names(["dose, in mg"])
    (['sex', 'dx'], ['dose, in mg'])
    """
    names = given.split(",") if isinstance(given, str) else map(str, given or ())
    return [composed(name.strip()) for name in names if name.strip()]


def read_records(path: Path, text: Iterable[str], separator: str) -> Iterator[Record]:
    """The rows of the lines of a file, without empty lines."""
    for line, cells in csv_rows(path, text, separator):
        yield Record(line, [cell.strip() for cell in cells])


def _with_points(path: Path, header: Record, rows: Iterable[Record]) -> Iterator[Record]:
    """The rows with 1.5 for 1,5. Where some numbers have a comma, others cannot have a point.

    In such a table 2.736 may be 2736.
    """
    seen: dict[str, str] = {}
    for line, cells in rows:
        for place, cell in enumerate(cells):
            if found := DECIMAL.fullmatch(cell):
                cells[place] = cell.replace(",", ".")
                if found[1] not in seen:
                    name = (*header.cells, "")[min(place, len(header.cells))]
                    seen[found[1]] = f"{cell!r} in column {name!r} (line {line})"
        if len(seen) > 1:
            raise InputError(
                f"{path}: line {line}: {' and '.join(seen.values())} are written in two ways: "
                "write all numbers with a decimal comma or all with a point, and thousands "
                "without a mark",
                public="the table has numbers with a decimal comma and others with a point",
            )
        yield Record(line, cells)


def delimiter(first: str, column: str = "") -> str:
    """Decide between comma, semicolon and tab by the first line of a file.

    It is the one that shows the given name as a column, else the one that makes more columns. With
    as many of both, commas are more likely to stand within a name than semicolons, or tabs.

    >>> delimiter("age;dose, in mg;ill", "ill"), delimiter("dose, in mg;ill")
    (';', ';')
    """
    best = ","
    best_score = (False, 1)
    for separator in ",;\t":
        names = [name.strip(' "\r\n') for name in first.split(separator)]
        score = (column in names, len(names))
        if score >= best_score and len(names) > 1:
            best = separator
            best_score = score
    return best
