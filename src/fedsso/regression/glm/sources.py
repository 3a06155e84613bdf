"""Whatever a person has becomes a table for each hospital: files, data frames, a federation."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ...data import Federation
from ...data.tables import clients_of
from ...errors import InputError, unknown
from ...support.intake import is_folder, user_path
from ..design import Table
from ..result.predict import cell_text, table_of
from ..schema import NUMBER, Column, Schema

Tables: TypeAlias = dict[str, Table]

FORMS = (
    "give a folder of CSV files, a list or dictionary of such files, a data frame with hospital=, "
    "a dictionary of data frames, or a Federation"
)
OUTCOME = "outcome"
"""What the outcome of a federation without names is called."""
FILLED = (
    "missing values, if any, were replaced by medians when the data were loaded; for complete "
    "cases or an indicator give the CSV files"
)
"""A standardised federation does not tell whether its table had gaps."""


class Tabled(NamedTuple):
    """The tables of all hospitals, and what is known about their columns."""

    tables: Tables
    outcome: str
    schema: Schema | None = None
    """Of a federation, whose columns are numbers already."""
    notes: tuple[str, ...] = ()
    """Sentences that a reader of the results should see."""
    lost: Mapping[str, InputError] = {}
    """The hospitals whose tables cannot be read, and why."""


def tables_of(data: Any, outcome: str, hospital: str) -> Tabled:
    """One table for each hospital, by its name.

    Args:
        data: See FORMS.
        outcome: The name of the outcome. A federation may go without one.
        hospital: The column that says which hospital a row belongs to. Empty: a file, or an entry
            of a dictionary, is a hospital.

    Raises:
        InputError: The data are something else, no table can be read, or two hospitals would have
            the same name.
    """
    if isinstance(data, Federation):
        return _federation(data, outcome)
    found, lost = _tables(data)
    if hospital:
        found = _split(found, hospital)
    elif len(found) + len(lost) == 1 and not _is_named(data):
        raise InputError(
            "one table needs the column that says which hospital a row belongs to: --hospital "
            "NAME (in Python hospital=)"
        )
    return Tabled(found, outcome, lost=lost)


def check_apart(data: Any, out: str | os.PathLike[str]) -> None:
    """Refuse a folder for the model within a folder of tables: its tables would be hospitals'."""
    given = data if isinstance(data, list | tuple) else [data]
    target = user_path("folder", out).resolve()
    for one in given:
        if not isinstance(one, str | os.PathLike):
            continue
        folder = user_path("data", one).resolve()
        if is_folder(folder) and (target == folder or folder in target.parents):
            raise InputError(
                f"the folder for the model, {out}, is in {one}, the folder of the hospitals' "
                f"tables: choose one elsewhere"
            )


def _is_named(data: Any) -> bool:
    """Whether hospitals have names by themselves: files in a folder, entries of a dictionary."""
    if isinstance(data, Mapping):
        return True
    return isinstance(data, str | os.PathLike) and is_folder(user_path("data", data))


def _tables(data: Any) -> tuple[Tables, dict[str, InputError]]:
    """The tables by the names of files or entries, and why others cannot be read."""
    if hasattr(data, "columns") and hasattr(data, "itertuples"):
        return {"": table_of(data, "the data frame")}, {}
    if isinstance(data, str | os.PathLike) or _are_paths(data):
        data = clients_of(data)
    if not isinstance(data, Mapping):
        raise InputError(f"data cannot be a {type(data).__name__}: {FORMS}")
    found: Tables = {}
    lost: dict[str, InputError] = {}
    for key, one in data.items():
        name = str(key)
        if name in found or name in lost:
            raise InputError(f"two hospitals would be called {name!r}: rename one")
        try:
            found[name] = table_of(one, f"the table {name!r}")
        except InputError as error:
            lost[name] = error
    if lost and not found:
        raise next(iter(lost.values()))
    return found, lost


def _are_paths(data: Any) -> bool:
    """Whether these are paths, several of them."""
    if not isinstance(data, Sequence) or not data:
        return False
    return all(isinstance(one, str | os.PathLike) for one in data)


def _split(tables: Tables, hospital: str) -> Tables:
    """The rows of some tables by the hospital that a column names."""
    found: Tables = {}
    for table in tables.values():
        if hospital not in table.names:
            raise InputError(f"{table.where}: {unknown('column', hospital, table.names)}")
        place = table.names.index(hospital)
        names = _without(table.names, place)
        lines = table.lines or range(1, len(table.rows) + 1)
        own: dict[str, list[int]] = {}
        for number, row in enumerate(table.rows):
            if not row[place]:
                raise InputError(
                    f"{table.where}: row {lines[number]} has no {hospital!r}, which names the "
                    f"hospital: fill it in, or remove the row"
                )
            own.setdefault(row[place], []).append(number)
        for name, numbers in own.items():
            rows = [list(_without(table.rows[number], place)) for number in numbers]
            before = found.get(name)
            if before is not None:
                if before.names != names:
                    raise InputError(
                        f"{table.where}: hospital {name!r} has other columns in another file: "
                        f"give its rows in one file"
                    )
                rows = [*before.rows, *rows]
            found[name] = Table(names, rows, f"hospital {name!r}", levels=table.levels)
    return dict(sorted(found.items()))


def _without(cells: Sequence[str], place: int) -> tuple[str, ...]:
    """All cells but one."""
    return (*cells[:place], *cells[place + 1 :])


def shared(tables: Tables) -> tuple[Table, list[str]]:
    """All rows under the columns that every table has, and the columns that not all have.

    A schema is inferred from it where nobody gave one. It exists only where one person holds all
    tables.
    """
    every = list(tables.values())
    names = [name for name in every[0].names if all(name in one.names for one in every)]
    rows = []
    others: dict[str, None] = {}
    levels: dict[str, Sequence[str]] = {}
    for table in every:
        places = [table.names.index(name) for name in names]
        rows += [[row[place] for place in places] for row in table.rows]
        others |= dict.fromkeys(name for name in table.names if name not in names)
        levels = {**table.levels, **levels}
    return Table(tuple(names), rows, "all tables together", levels=levels), list(others)


# ---- federations ----


def _federation(fed: Federation, outcome: str) -> Tabled:
    """The rows of every client, training and test together, in the units of the table."""
    if len(fed.sample_shape) != 1:
        shape = "×".join(map(str, fed.sample_shape))
        raise InputError(f"a regression needs a table, the samples of {fed.name!r} are {shape}")
    name = outcome or OUTCOME
    x = fed.x.double().cpu().numpy() * fed.affine[0] + fed.affine[1]
    columns = tuple(f"x{place + 1}" for place in range(x.shape[1]))
    if fed.scaling is not None:
        factor = fed.scaling.factor.numpy()
        # A constant column has the factor 0: its value is its mean.
        x = np.divide(x, factor, out=np.zeros_like(x), where=factor != 0)
        x += fed.scaling.mean.numpy()
        columns = fed.scaling.columns or columns
    y: list[Any] = fed.y.tolist()
    if fed.classes:
        y = [fed.labels[label] for label in y]
    tables: Tables = {}
    clients = fed.client_names or tuple(map(str, range(fed.clients)))
    for i, client in enumerate(clients):
        own = [*fed.rows_of(i).tolist(), *fed.rows_of(i, "test").tolist()]
        rows = []
        for row in sorted(own):
            rows.append([*map(cell_text, x[row].tolist()), cell_text(y[row])])
        tables[client] = Table((*columns, name), rows, f"client {client!r}")
    negative, positive = fed.labels if fed.classes == 2 else ("", "")
    numbers = tuple(Column(column, NUMBER) for column in columns)
    notes = () if fed.scaling is None else (FILLED,)
    return Tabled(tables, name, Schema(name, numbers, positive, negative), notes)
