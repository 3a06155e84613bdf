"""Standardising a table: fill its gaps and bring every column to mean 0 and deviation 1.

Medians, means and deviations are those of the training rows. A `Scaling` keeps them, so that new
rows can be prepared for the trained model in exactly the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from ..support.sparse import is_csr
from .arrays import check_every_value, dense, pieces
from .mapped.rows import MappedRows

COLUMNS = 256 << 20  # bytes of the columns of a file that are in memory at the same time


class Scaling(NamedTuple):
    """What prepares the rows of a table for a model.

    A gap (NaN) takes the column's median. Then a column becomes (x - mean) * factor. All tensors
    are float64 [columns]. Call it like a function:

    >>> scaling = Scaling(*torch.tensor([[5.0], [4.0], [0.5]]).double())
    >>> scaling([[6.0], [float("nan")]])
    tensor([[1.0000],
            [0.5000]])
    """

    median: Tensor
    mean: Tensor
    factor: Tensor  # 1 / deviation, or 0 for a constant column
    columns: tuple[str, ...] = ()  # the names of the columns, where they have names
    units: tuple[str, ...] = ()  # their units, where a schema tells them

    def __call__(self, x: Any) -> Tensor:
        """Prepare one row or several for the model.

        Args:
            x: One row [columns] or several [rows, columns], with NaN for gaps. A data frame is
                read by the names of its columns, so their order does not matter, and others are
                ignored.

        Returns:
            float32 [rows, columns], also for a single row.

        Raises:
            InputError: x has another number of columns than the training rows, or lacks one by
                name.
        """
        if self.columns and hasattr(x, "columns"):
            x = self._by_name(x)
        rows = dense(x, "x").double()
        if rows.ndim == 1:
            rows = rows[None]
        wanted = len(self.mean)
        width = rows.shape[-1]
        if width != wanted:
            raise InputError(
                f"x must have {wanted} columns, as the training rows have, got {width}"
            )
        filled = torch.where(rows.isnan(), self.median, rows)
        scaled = (filled - self.mean) * self.factor
        return scaled.float()

    def _by_name(self, frame: Any) -> Any:
        """The columns of a data frame that the model was trained on, in the same order."""
        absent = [name for name in self.columns if name not in frame.columns]
        if absent:
            raise InputError(
                f"x lacks the columns {', '.join(absent)}: the model was trained on {self.columns}"
            )
        return frame[list(self.columns)]


def check_not_standardised(x: Tensor, standardise: bool) -> None:
    """Refuse to standardise sparse rows: a mean that is taken off would make them dense."""
    if standardise and is_csr(x):
        raise InputError(
            "standardise=True would make sparse rows dense, got a sparse x: scale its columns "
            "yourself, or make it dense (scipy: x.toarray())"
        )


def scaling_of(x: Tensor, train: Tensor) -> Scaling:
    """Compute the scaling of a table x [rows, columns] from the rows that `train` lists.

    The moments are computed in float64, column by column, so that no copy of the table is made.
    InputError for a column that has only gaps in these rows.
    """
    medians = []
    means = []
    factors = []
    for number, values in enumerate(_columns(x, train)):
        median, mean, factor = _moments(values, number)
        medians.append(median)
        means.append(mean)
        factors.append(factor)
    return Scaling(
        torch.tensor(medians, dtype=torch.float64),
        torch.tensor(means, dtype=torch.float64),
        torch.tensor(factors, dtype=torch.float64),
    )


def _columns(x: Tensor, train: Tensor) -> Iterator[Tensor]:
    """The columns of a table, of the rows that `train` lists and in that order, float64."""
    if not isinstance(x, MappedRows):
        for column in x.T:
            yield column[train].double()
        return
    # Files are read from their beginning to their end, for as many columns at once as there is
    # room for.
    place = torch.full((len(x),), -1)
    place[train] = torch.arange(len(train))
    width = x.shape[1]
    some = max(1, COLUMNS // (8 * len(train)))
    raw = MappedRows(x.parts, gaps=True)
    for low in range(0, width, some):
        block = torch.empty(min(some, width - low), len(train), dtype=torch.float64)
        before = 0
        for piece in pieces(raw):
            at = place[before : before + len(piece)]
            known = at >= 0
            block[:, at[known]] = piece[known, low : low + some].double().T
            before += len(piece)
        yield from block


def standardised(x: Tensor, scaling: Scaling) -> Tensor:
    """A table as models see it, float32; that of a file is scaled when its rows are taken.

    InputError if a number is too large for float32 now, as in a test row far outside the range of
    the training rows.
    """
    if isinstance(x, MappedRows):
        return MappedRows(x.parts, scaling.__call__, gaps=True)
    out = torch.empty(x.shape, dtype=torch.float32)
    before = 0
    for piece in pieces(x):
        out[before : before + len(piece)] = scaling(piece)
        before += len(piece)
    problem = "x, standardised, has NaN or Inf"
    check_every_value(out, torch.isfinite, problem, "remove the row")
    return out


def _moments(column: Tensor, number: int) -> tuple[float, float, float]:
    """The median of a column, and its mean and 1 / deviation after its gaps are filled.

    The deviation is that of the population. A constant column has the factor 0.
    """
    known = column[~column.isnan()]
    if not len(known):
        raise InputError(f"column {number} of x has no value in any training row: leave it out")
    middle = np.median(known.numpy())
    median = float(middle)
    filled = torch.where(column.isnan(), median, column)
    smallest, greatest = filled.aminmax()
    low = float(smallest)
    high = float(greatest)
    if low == high:
        return median, low, 0.0
    largest = max(abs(low), abs(high))  # squares of numbers up to 1 do not overflow
    deviation, mean = torch.std_mean(filled / largest, correction=0)
    spread = float(deviation) * largest  # 0 if it is too small for float64
    factor = 1 / spread if spread else 0.0
    return median, float(mean) * largest, factor
