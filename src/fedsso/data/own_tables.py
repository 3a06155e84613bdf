"""A user's own tables: as they are, or by a schema that says what their columns mean.

Without a schema every column but the outcome must hold numbers. With one, text becomes columns of 0
and 1, identifiers and additional columns are passed over, and gaps are treated by the schema's
rule. The columns are then those of the design of a regression, without its intercept.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ..errors import InputError
from .options import FEATURES, GROUP, OUTCOME, TASK
from .pool import Pool
from .tables import MISSING, Files, Names, csv_pool

if TYPE_CHECKING:
    from ..regression.schema import Schema

SchemaLike: TypeAlias = "Schema | str | os.PathLike[str]"
"""A schema, its file, or its text."""


def csv(
    paths: Sequence[Path],
    *,
    outcome: str = OUTCOME.default,
    schema: SchemaLike | None = None,
    features: Names = FEATURES.default,
    group: str = GROUP.default,
    task: str = TASK.default,
) -> Pool:
    """Read CSV files for the data set "csv".

    Args:
        paths: The files. Their columns must be the same, in any order.
        outcome: The name of the column to predict.
        schema: What the columns mean. None: all but the outcome are numbers.
        features: The names of the columns to learn from. Empty: all others.
        group: The name of the column that says which client a row belongs to. Empty: a file is a
            client.
        task: "auto" takes names and whole numbers as labels. "regression" takes numbers as they
            are.

    Returns:
        The rows of all files, to be standardised. See `csv_pool` and `schema_pool`.
    """
    is_regression = TASK.check(task) == "regression"
    classes = 0 if is_regression else None
    if schema is None:
        return csv_pool(paths, outcome, features or None, group=group, classes=classes)
    from .schema_tables import schema_pool

    _check_unused(features=features)
    return schema_pool(paths, schema, outcome, group, classes)


def own_pool(
    files: Files,
    outcome: str,
    schema: SchemaLike | None,
    features: Sequence[str] | None = None,
    missing: Sequence[str] = MISSING,
    classes: int | None = None,
    group: str = "",
) -> Pool:
    """Read tables with or without a schema. See `csv_pool` and `schema_pool` for the arguments."""
    if schema is None:
        return csv_pool(files, outcome, features, missing, classes, group)
    from .schema_tables import schema_pool

    _check_unused(features=features, missing=() if missing == MISSING else missing)
    return schema_pool(files, schema, outcome, group, classes)


def _check_unused(**options: object) -> None:
    """Raise InputError for options that a schema stands for."""
    for name, value in options.items():
        if value:
            raise InputError(
                f"{name} is for tables without a schema, got {name}={value!r}: write it into the "
                f"schema"
            )
