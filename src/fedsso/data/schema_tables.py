"""Tables of a user by a schema: text becomes columns of 0 and 1, and gaps follow a rule.

The columns are those of the design of a regression, without its intercept. It is loaded only where
a schema is given.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ..errors import InputError
from ..regression.cells import is_gap, number, yes_or_no
from ..regression.design import Table, cells_of, explanatory, read_table, terms
from ..regression.outcome import GAUSSIAN, read_events
from ..regression.schema import Schema, read
from ..support.intake import composed
from .pool import Pool
from .tables import (
    MISSING,
    Array,
    Files,
    Names,
    SchemaLike,
    Targets,
    checked_targets,
    class_names_of,
    clients_of,
    joined,
    labels_of,
)


class _Part(NamedTuple):
    """The rows of one file that can be used."""

    path: Path
    x: Array
    """The columns of the design, [rows, columns]."""
    table: Table
    """These rows alone, as text."""


def schema_pool(
    files: Files,
    schema: SchemaLike,
    outcome: str = "",
    group: str = "",
    classes: int | None = None,
) -> Pool:
    """Read several CSV files into one pool of rows, by a schema.

    Args:
        files: A folder, a list of paths, or a dictionary {client's name: path}.
        schema: A schema, its file, or its text.
        outcome: The column to predict, if it is given beside the schema: the same.
        group: The name of the column that says which client a row belongs to. Empty: a file is a
            client.
        classes: As in `csv_pool`.

    Raises:
        InputError: A file does not fit the schema, or no row of it can be used.
    """
    known = schema if isinstance(schema, Schema) else read(schema)
    outcome, group = composed(outcome), composed(group)
    if outcome not in ("", known.outcome):
        raise InputError(
            f"outcome is {outcome!r}, and {known.outcome!r} in the schema: leave it out, or change "
            f"the schema"
        )
    # A model for training has an intercept of its own.
    known = replace(known, intercept=False)
    clients = clients_of(files)
    parts = []
    owners: list[str] = []
    notes: list[str] = []
    for client, path in clients.items():
        part, note = _part(path, known)
        rows = len(part.x)
        owners += cells_of(part.table, group).texts if group else [client] * rows
        parts.append(part)
        notes += note
    _check_owners(owners, group)
    y, own_notes, names = _targets(parts, known, classes)
    made = terms(known, GAUSSIAN)
    return Pool(
        torch.from_numpy(np.concatenate([part.x for part in parts])),
        y,
        group=np.array(owners, dtype=object),
        class_names=names,
        notes=(*notes, *own_notes),
        standardise=True,
        columns=tuple(term.name for term in made),
        units=tuple(term.unit for term in made),
    )


def _part(path: Path, schema: Schema) -> tuple[_Part, list[str]]:
    """The rows of a file without a gap that drops them, and a note if some were dropped."""
    table = read_table(path, schema.outcome)
    x = explanatory(table, schema, GAUSSIAN)
    outcomes = cells_of(table, schema.outcome).texts
    kept = []
    for row, cell in enumerate(outcomes):
        if not np.isnan(x[row]).any() and not is_gap(cell, schema.marks):
            kept.append(row)
    if not kept:
        raise InputError(
            f"{path}: none of {len(x)} rows can be used: all have missing values; see `missing` "
            "in the schema"
        )
    rows = [table.rows[row] for row in kept]
    lines = tuple(table.lines[row] for row in kept)
    part = _Part(path, x[kept], table._replace(rows=rows, lines=lines))
    dropped = len(x) - len(kept)
    if not dropped:
        return part, []
    return part, [f"{path.name}: {dropped} of {len(x)} rows are left out because of missing values"]


def _check_owners(owners: Sequence[str], group: str) -> None:
    """Raise InputError for a row that names no client."""
    empty = sum(not owner for owner in owners)
    if empty:
        raise InputError(
            f"{empty} rows have no {group!r}, which names the client: fill it in, or remove them"
        )


def _targets(
    parts: Sequence[_Part],
    schema: Schema,
    classes: int | None,
) -> tuple[torch.Tensor, Names, Names]:
    """The labels or real targets of all rows, notes for the user, and the names of classes."""
    name = schema.outcome
    columns = [cells_of(part.table, name, schema.marks) for part in parts]
    texts = set(chain.from_iterable(cells.texts for cells in columns))
    are_words = all(yes_or_no(text) is not None for text in texts)
    are_numbers = all(number(text) is not None for text in texts)
    if classes != 0 and (schema.positive or (are_words and not are_numbers)):
        events = [read_events(cells, schema) for cells in columns]
        both = (schema.negative or "no", schema.positive or "yes")
        return torch.from_numpy(np.concatenate(events)).long(), (), both
    targets = []
    for part, cells in zip(parts, columns, strict=True):
        found = Targets(list(cells.texts), array("q", part.table.lines))
        targets.append(checked_targets(part.path, found, name, MISSING))
    y = joined(targets, [part.path for part in parts], name)
    label, notes = labels_of(y, name, classes)
    return label, notes, class_names_of(y, label)
