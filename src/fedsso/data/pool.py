"""The pool: all rows of a data set, before they are shared out among clients.

Every reader of files returns a `Pool`. A partition then decides which client holds which rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch import Tensor


class Pool(NamedTuple):
    """Rows, labels and, where the files say it, the owner of each row."""

    # The samples, [rows, *sample], uint8 or float32; sparse ones in layout CSR, those that stay in
    # files as `MappedRows`. With `standardise`, NaN marks a gap.
    x: Tensor
    # One int64 label or one floating target for each row, [rows].
    y: Tensor
    # A model sees x * affine[0] + affine[1], computed in floating point.
    affine: tuple[float, float] = (1.0, 0.0)
    # The name or number of the hospital, user or speaker that each row belongs to, [rows].
    group: np.ndarray[Any, Any] | None = None
    # The number of classes. 0: that of the data set, or as many as the labels show.
    classes: int = 0
    # What each label stands for, where that is more than its number.
    class_names: tuple[str, ...] = ()
    # What a user should know about these rows.
    notes: tuple[str, ...] = ()
    # The names of the features of a table, where they have names.
    columns: tuple[str, ...] = ()
    # Their units, where a schema tells them.
    units: tuple[str, ...] = ()
    # Whether to fill gaps and to scale columns, once it is known which rows are for training.
    standardise: bool = False
