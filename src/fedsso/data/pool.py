"""What a reader makes of a data set's files: all rows, before they are shared out."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch import Tensor


class Pool(NamedTuple):
    """Rows, labels and, where the data know it, whom each row belongs to."""

    x: Tensor  # [rows, *sample], uint8 or float32; NaN marks a gap where `standardise` is set
    y: Tensor  # [rows], int64 labels or floating targets
    affine: tuple[float, float] = (
        1.0,
        0.0,
    )  # a sample is x * affine[0] + affine[1], after widening
    group: np.ndarray[Any, Any] | None = None  # [rows] of names: hospital, user, speaker
    classes: int = 0  # 0: those of the data set, or as many as the labels show
    notes: tuple[str, ...] = ()  # what a user should know about these rows
    columns: tuple[str, ...] = ()  # names of the features of a table, where they have names
    standardise: bool = (
        False  # fill gaps and scale columns by the training rows, once these are known
    )
