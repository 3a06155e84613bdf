"""Standardising a table: fill its gaps and bring every column to mean 0 and deviation 1.

Medians, means and deviations are those of the training rows. A `Scaling` keeps them, so that new
rows can be prepared for the trained model in exactly the same way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from ..support.sparse import is_csr
from .arrays import dense


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
    for number, column in enumerate(x.T):
        values = column[train].double()
        median, mean, factor = _moments(values, number)
        medians.append(median)
        means.append(mean)
        factors.append(factor)
    return Scaling(
        torch.tensor(medians, dtype=torch.float64),
        torch.tensor(means, dtype=torch.float64),
        torch.tensor(factors, dtype=torch.float64),
    )


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
