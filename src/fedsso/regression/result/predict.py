"""Predictions for new patients, by a fitted model and the schema that it was fitted with."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...errors import InputError
from ...support.intake import composed
from ..design import Table, explanatory, offsets, read_table, terms
from ..outcome import COX
from ..questions import Array

if TYPE_CHECKING:
    from .regression import Regression


EXACT = 2**53
"""Up to here a float is every whole number."""


class Predictions(NamedTuple):
    """One number for each patient [n]. NaN where a gap leaves the patient out."""

    prediction: Array
    """The mean of the outcome; of survival data, the hazard ratio to an average patient."""
    prediction_low: Array
    prediction_high: Array
    linear_predictor: Array
    linear_std_error: Array


def predicted(model: Regression, table: Table, wide: float) -> Predictions:
    """Predict every row of a table; intervals reach `wide` standard errors to each side.

    The interval is made for the linear predictor and then transformed, so that a probability stays
    between 0 and 1. It is that of the mean, not of a single new outcome.
    """
    fit = model.fit
    x = _known(model, explanatory(table, model.schema, fit.family))
    if model.family.name == COX:
        # Survival data have no intercept: hazards are relative to a patient with the federation's
        # means of all numbers, and the reference level of all categories.
        x = x - fit.mean
    eta = x @ fit.coefficients + offsets(table, model.schema)
    variance = np.einsum("ij,jk,ik->i", x, model.covariance, x)
    error = np.sqrt(np.maximum(variance, 0.0))
    mean = model.family.mean
    return Predictions(
        mean(eta),
        mean(eta - wide * error),
        mean(eta + wide * error),
        eta,
        error,
    )


def _known(model: Regression, x: Array) -> Array:
    """The columns [n, p] that have a coefficient, of all columns of the schema.

    A level that no hospital had has none: the rows of new patients with it become NaN.
    """
    every = [term.name for term in terms(model.schema, model.fit.family)]
    used = [every.index(name) for name in model.fit.names]
    others = [place for place in range(len(every)) if place not in used]
    strange = (x[:, others] != 0).any(1)
    found: Array = np.where(strange[:, None], np.nan, x[:, used])
    return found


# ---- tables of any kind ----


def table_of(data: Any, where: str = "the table") -> Table:
    """A table of text: a `Table` as it is, a CSV file by its path, or a data frame.

    Raises:
        InputError: It is neither, or the file cannot be read.
    """
    if isinstance(data, Table):
        return data
    if isinstance(data, str | os.PathLike):
        return read_table(data)
    if hasattr(data, "columns") and hasattr(data, "itertuples"):
        return _from_frame(data, where)
    kind = type(data).__name__
    raise InputError(f"{where} must be a data frame or the path of a CSV file, got {kind}")


def _from_frame(frame: Any, where: str) -> Table:
    """The cells of a data frame as text."""
    names = tuple(composed(str(name)) for name in frame.columns)
    rows = [_texts(row) for row in frame.itertuples(index=False, name=None)]
    levels = {}
    for name, kind in zip(names, frame.dtypes, strict=True):
        if hasattr(kind, "categories"):
            levels[name] = _texts(kind.categories)
    return Table(names, rows, where, levels=levels)


def _texts(cells: Iterable[Any]) -> list[str]:
    return [cell_text(cell) for cell in cells]


def _number_text(value: float) -> str:
    """A number in full; a whole one without a point, as people write codes."""
    if math.isnan(value):
        return ""
    is_short = value.is_integer() and abs(value) < EXACT
    return str(int(value)) if is_short else repr(value)


def cell_text(cell: Any) -> str:
    """A cell as text from which the same number can be read; a gap is empty.

    >>> cell_text(0.1), cell_text(3.0), cell_text(True), cell_text(float("nan"))
    ('0.1', '3', 'yes', '')
    """
    if cell is None:
        return ""
    if isinstance(cell, bool | np.bool_):
        return "yes" if cell else "no"
    if isinstance(cell, float | np.floating):
        return _number_text(float(cell))
    text = composed(str(cell).strip())
    # Data frames have gaps of their own for texts and dates.
    return "" if text in ("<NA>", "NaT") else text
