"""A first schema from one hospital's table, to be read and corrected by a person.

    schema, notes = infer(read_table("north.csv"), "disease")

It tells by the cells of a column what the column is:

    categories           a column of a data frame with levels (pd.Categorical), in their order
    numbers              all cells are numbers or gaps; 0 and 1 stay numbers
    yes or no            all cells are yes/no, true/false, y/n or t/f
    categories           a few texts that repeat
    left out             identifiers, names, free text, columns with one value or none
    refused              dates, and numbers among which some cells are text
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from ..errors import InputError, unknown
from ..support.intake import composed
from ..support.records import DECIMAL_COMMA, column_names
from .cells import LARGEST, is_date, is_gap, is_too_large, number, same, yes_or_no
from .design import Table
from .outcome import RECODE
from .reading import COMMAS
from .schema import (
    CATEGORY,
    COMPLETE,
    DATES,
    IGNORE,
    MEDIAN,
    NUMBER,
    YESNO,
    Column,
    Schema,
    check,
)

LEVELS = 20
"""A text column of more different texts is no category."""
CODES = 10
"""A column of at least 3 and at most so many different whole numbers may be one of codes."""
TWO_LEVELS = "needs two"
"""In the note about an outcome of more levels."""
RARE = 3
"""A level of fewer rows could tell about a single patient."""

IDENTIFIERS = {"id", "identifier", "uuid", "mrn", "ssn"}
"""The last words of names of identifiers, as in study_id."""
PERSONS = {
    *("patient", "patients", "subject", "name", "surname", "first name", "last name"),
    *("patient name", "patient number", "patient no", "record number", "case number"),
}
"""Names of columns that tell who somebody is."""
UNIT = re.compile(r".*\S\s*[\[(]\s*([^\])]+?)\s*[\])]")
"""A name with a unit, such as "weight (kg)"."""


def infer(
    table: Table,
    outcome: str,
    *,
    time: str = "",
    weights: str = "",
    offset: str = "",
    missing: str = COMPLETE,
    ignore: str | Iterable[str] = (),
    categories: str | Iterable[str] = (),
) -> tuple[Schema, list[str]]:
    """Make a schema from a table. Returns it, and notes for the person who corrects it.

    Args:
        table: One hospital's table.
        outcome: The column to explain. Of survival data: whether the event was seen.
        time: Of survival data: the column of the time at risk.
        weights: The column of weights, if there is one.
        offset: The column of the offset, if there is one.
        missing: What happens to a row with a gap, "complete" or "median".
        ignore: Columns to leave out: a list, or a text with commas between them.
        categories: Columns whose numbers are codes of levels, likewise.

    Raises:
        InputError: The table lacks a column or has no rows, or a column holds dates, or numbers
            with other texts among them. The message tells the remedy.
    """
    outcome, time, weights, offset = (
        composed(name or "") for name in (outcome, time, weights, offset)
    )
    ignore = column_names(ignore)
    categories = column_names(categories)
    roles = [name for name in (outcome, time, weights, offset) if name]
    for name in (*roles, *ignore, *categories):
        if name not in table.names:
            raise InputError(f"{table.where}: {unknown('column', name, table.names)}")
    if not table.rows:
        raise InputError(f"{table.where}: has no rows; a schema is made from at least 1 row")
    known = {name: _known(table, name) for name in table.names}
    explaining = [name for name in table.names if name not in roles]
    _refuse_dates(table.where, {name: known[name] for name in explaining if name not in ignore})
    notes: list[str] = []
    columns = []
    for name in explaining:
        column = Column(name, IGNORE)
        if name not in ignore:
            order = table.levels.get(name, ())
            column = _column(name, known[name], name in categories, notes, order)
        if missing == MEDIAN and column.type == NUMBER:
            column = _filled(column, known[name])
        columns.append(column)
    positive, negative = _events(outcome, known[outcome], notes, table.levels.get(outcome, ()))
    schema = Schema(
        outcome,
        tuple(columns),
        positive=positive,
        negative=negative,
        time=time,
        weights=weights,
        offset=offset,
        missing=missing,
    )
    check(schema, table.where)
    return schema, notes


def _known(table: Table, name: str) -> list[str]:
    """The cells of a column that are no gaps."""
    place = table.names.index(name)
    return [row[place] for row in table.rows if not is_gap(row[place])]


def _refuse_dates(where: str, columns: dict[str, list[str]]) -> None:
    """Raise InputError if most cells of a column are dates."""
    dates = [name for name, cells in columns.items() if sum(map(is_date, cells)) * 2 > len(cells)]
    if dates:
        listed = ", ".join(map(repr, dates))
        verb = "hold" if len(dates) > 1 else "holds"
        raise InputError(
            f"{where}: column {listed} {verb} dates, which a regression cannot use{DATES}; or "
            f"leave it out (--ignore {','.join(dates)})",
            public=f"column {listed} {verb} dates",
        )


# ---- one column ----


def _column(
    name: str,
    cells: Sequence[str],
    is_code: bool,
    notes: list[str],
    order: Sequence[str],
) -> Column:
    """What a column is, by its name and by its cells that are no gaps. Notes are added.

    `order` has the levels of a column with an order of its own.
    """
    levels = Counter(cells)
    numbers = [number(cell) for cell in cells]
    are_numbers = None not in numbers
    if is_code:
        return _category(name, levels, notes, order)
    if not levels:
        return _left_out(name, "it has no value in this table", notes)
    if is_identifier(name):
        return _left_out(name, "its name is that of an identifier", notes)
    if len(levels) == 1:
        return _left_out(name, "it has one value only in this table", notes)
    if order and len(levels) <= LEVELS:
        return _category(name, levels, notes, order)
    if are_numbers:
        notes += _codes(name, _merged(levels))
        return Column(name, NUMBER, unit=_unit(name))
    if all(yes_or_no(cell) is not None for cell in levels):
        return Column(name, YESNO)
    _refuse_commas(name, cells, numbers)
    if len(levels) <= LEVELS and 2 * len(levels) <= len(cells):
        return _category(name, levels, notes, order)
    _refuse_mixed(name, cells, numbers)
    if len(levels) == len(cells):
        return _left_out(name, "all its texts are different, as those of an identifier", notes)
    return _left_out(name, f"it has {len(levels)} different texts", notes)


def is_identifier(name: str) -> bool:
    """Whether a column's name is that of an identifier or of a person's name.

    >>> is_identifier("StudyID"), is_identifier("patient_name"), is_identifier("patient_age")
    (True, True, False)
    """
    apart = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)
    words = re.findall(r"[a-z0-9]+", apart.lower())
    return bool(words) and (words[-1] in IDENTIFIERS or " ".join(words) in PERSONS)


def _left_out(name: str, why: str, notes: list[str]) -> Column:
    """A column to ignore, with a note that says why."""
    notes.append(f"column {name!r} is left out: {why}")
    return Column(name, IGNORE)


def _category(
    name: str,
    levels: Counter[str],
    notes: list[str],
    order: Sequence[str],
) -> Column:
    """A column of levels in their own order."""
    levels = _merged(levels)
    ordered = _sorted(levels, order)
    notes.append(
        f"column {name!r} is a category with the levels of this table, {', '.join(ordered)}: add "
        f"those that other hospitals have; the first is the reference"
    )
    rare = [level for level in ordered if levels[level] < RARE]
    if rare:
        notes.append(
            f"column {name!r}: fewer than {RARE} rows have {', '.join(rare)}: see whether these "
            f"levels may be shared, or join them with others"
        )
    return Column(name, CATEGORY, levels=tuple(ordered))


def _merged(levels: Counter[str]) -> Counter[str]:
    """The levels, of which 1 and 1.0 are one: it is called as in the shortest of the texts."""
    found: Counter[str] = Counter()
    for level in sorted(levels, key=len):
        name = next((one for one in found if same(level, one)), level)
        found[name] += levels[level]
    return found


def _sorted(levels: Iterable[str], order: Sequence[str]) -> list[str]:
    """Levels as in `order`; others after them: numbers by their size, then texts."""

    def key(level: str) -> tuple[int, bool, float, str]:
        place = order.index(level) if level in order else len(order)
        value = number(level)
        return place, value is None, value or 0.0, level

    return sorted(levels, key=key)


def _codes(name: str, levels: Counter[str]) -> Iterator[str]:
    """A note on a column of few different whole numbers, which may be codes."""
    are_whole = all(float(level) % 1 == 0 for level in levels)
    if are_whole and 3 <= len(levels) <= CODES and 3 * len(levels) <= levels.total():
        ordered = ", ".join(sorted(levels, key=float))
        yield (
            f"column {name!r} is a number with the values {ordered}: if they are codes, take them "
            f"as levels (--categories {name})"
        )


def _refuse_commas(name: str, cells: Sequence[str], numbers: Sequence[float | None]) -> None:
    """Raise InputError if all cells that are no numbers have a decimal comma."""
    others = [cell for cell, value in zip(cells, numbers, strict=True) if value is None]
    if all(DECIMAL_COMMA.fullmatch(cell) for cell in others):
        raise InputError(
            f"column {name!r} has {len(others)} cells such as {others[0]!r}, {COMMAS} (if they are "
            f"codes: --categories {name}; or leave the column out: --ignore {name})",
            public=f"column {name!r}: {len(others)} of {len(cells)} cells have decimal commas",
        )


def _refuse_mixed(name: str, cells: Sequence[str], numbers: Sequence[float | None]) -> None:
    """Raise InputError if at least half of the cells are numbers, but not all."""
    others = [cell for cell, value in zip(cells, numbers, strict=True) if value is None]
    if 2 * len(others) <= len(cells):
        large = f", which is too large (beyond {LARGEST:g})" if is_too_large(others[0]) else ""
        raise InputError(
            f"column {name!r} has numbers, and {len(others)} cells of other text such as "
            f"{others[0]!r}{large}: correct them, or leave the column out (--ignore {name})",
            public=f"column {name!r}: {len(others)} of {len(cells)} cells are not numbers",
        )


def _unit(name: str) -> str:
    """The unit in a column's name, as in "weight (kg)"; "" if there is none."""
    found = UNIT.fullmatch(name)
    return found[1] if found else ""


def _filled(column: Column, cells: Sequence[str]) -> Column:
    """A column of numbers whose gaps take the median of these cells, in three figures.

    The indicator of the gaps makes the choice irrelevant for all other coefficients, so that it
    need not be exact.
    """
    middle = median(map(float, cells))
    return Column(column.name, NUMBER, unit=column.unit, fill=float(f"{middle:.3g}"))


# ---- the outcome ----


def _events(
    name: str,
    cells: Sequence[str],
    notes: list[str],
    order: Sequence[str],
) -> tuple[str, str]:
    """The level of an outcome that counts as an event, and the other one.

    Both are empty where yes or 1 is the event, and where there are not two levels.
    """
    levels = _sorted(set(cells), order)
    if all(yes_or_no(level) is not None for level in levels):
        return "", ""
    if len(levels) != 2:
        if any(number(level) is None for level in levels) or 3 <= len(levels) <= CODES:
            notes.append(
                f"the outcome {name!r} has {len(levels)} levels, and a logistic regression "
                f"{TWO_LEVELS}: {RECODE} (numbers: gaussian; counts: poisson)"
            )
        return "", ""
    negative, positive = levels
    notes.append(
        f"the outcome {name!r}: {positive!r} counts as the event, {negative!r} as none; exchange "
        f"positive and negative if it is the other way round"
    )
    return positive, negative
