"""What the text of a cell means: a gap, a number, yes or no, a date."""

from __future__ import annotations

import re
from collections.abc import Collection

GAPS = ("", "?", ".", "na", "n/a", "#n/a", "nan", "null")
"""The texts of a gap, in small letters. A schema may name more."""
YES = ("yes", "y", "true", "t", "1", "1.0")
NO = ("no", "n", "false", "f", "0", "0.0")
LARGEST = 3.4e38
"""The largest number of a table: what is beyond is a mistake, and its square is no number."""

DATE = re.compile(
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}([T ]\d{1,2}:\d{2}.*)?"
    r"|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2})([T ]\d{1,2}:\d{2}.*)?"
    r"|\d{1,2}[ -][A-Za-z]{3,9}[ -]\d{2,4}"
)


def is_gap(cell: str, marks: Collection[str] = ()) -> bool:
    """Whether a cell marks a gap. `marks` are texts of a gap beside the usual ones.

    >>> is_gap("NA"), is_gap("-9"), is_gap("-9", ["-9"])
    (True, False, True)
    """
    return cell.lower() in GAPS or cell in marks


def number(cell: str) -> float | None:
    """The number that a cell holds. None if it holds none.

    Python would also take 1_000 as a number, but a table that says so is more likely wrong.

    >>> number("-1.5"), number("1_000"), number("inf")
    (-1.5, None, None)
    """
    try:
        value = float(cell)
    except ValueError:
        return None
    if not -LARGEST <= value <= LARGEST or "_" in cell:
        return None
    return value


def is_too_large(cell: str) -> bool:
    """Whether a cell holds a number that is beyond the largest of a table.

    >>> is_too_large("1e300"), is_too_large("-1e400"), is_too_large("inf"), is_too_large("7")
    (True, True, False, False)
    """
    try:
        value = float(cell)
    except ValueError:
        return False
    return abs(value) > LARGEST and any(letter.isdigit() for letter in cell)


def yes_or_no(cell: str) -> float | None:
    """1 for yes, true and 1; 0 for no, false and 0. None for any other text.

    >>> yes_or_no("Yes"), yes_or_no("f"), yes_or_no("maybe")
    (1.0, 0.0, None)
    """
    small = cell.lower()
    if small in YES:
        return 1.0
    if small in NO:
        return 0.0
    return None


def is_date(cell: str) -> bool:
    """Whether a cell looks like a date, with or without a time.

    >>> is_date("2021-03-09"), is_date("9.3.2021"), is_date("1.5")
    (True, True, False)
    """
    return DATE.fullmatch(cell) is not None


def same(cell: str, text: str) -> bool:
    """Whether a cell has this text, or the same number written otherwise.

    >>> same("2.0", "2"), same("II", "ii")
    (True, False)
    """
    if cell == text:
        return True
    value = number(cell)
    return value is not None and value == number(text)
