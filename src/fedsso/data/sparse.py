"""From a user's sparse matrix to checked sparse rows.

Users pass matrices of scipy or sparse tensors of torch. The rows are kept as a tensor of layout
CSR (`support.sparse`) with sorted columns, no repeats and no zeros, so that two matrices with the
same numbers are the same federation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from ..support.sparse import canonical, entries, is_csr, rows_of_entries
from .arrays import dense


def rows_from(values: Any, what: str) -> Tensor:
    """The samples as a tensor on the CPU: sparse ones stay sparse, all else is `dense`.

    >>> rows_from(torch.eye(2).to_sparse(), "x").layout
    torch.sparse_csr
    """
    if is_csr(values):
        _, columns, numbers = entries(values.detach().cpu())
        return _rows(rows_of_entries(values), columns, numbers, tuple(values.shape), what)
    if isinstance(values, Tensor) and values.layout != torch.strided:
        if values.ndim != 2:
            raise InputError(f"{what} must be dense or [rows, features], got {values.ndim} axes")
        found = torch.Tensor.to_sparse(values.detach().cpu()).coalesce()
        rows, columns = found.indices()
        return _rows(rows, columns, found.values(), tuple(found.shape), what)
    if hasattr(values, "tocoo") and hasattr(values, "nnz"):  # a matrix or array of scipy
        if values.ndim != 2:
            raise InputError(f"{what} must be [rows, features], got {values.ndim} axes")
        found = values.tocoo()
        index = [torch.from_numpy(one.astype(np.int64)) for one in (found.row, found.col)]
        return _rows(index[0], index[1], dense(found.data, what), found.shape, what)
    return dense(values, what)


def _rows(
    rows: Tensor,
    columns: Tensor,
    values: Tensor,
    shape: tuple[int, ...],
    what: str,
) -> Tensor:
    """The CSR matrix of these entries, in float64 or float32."""
    if values.is_complex():
        raise InputError(f"{what} must be real, got dtype {values.dtype}")
    if not values.is_floating_point():
        values = values.float()
    wrong = ~values.isfinite()
    if wrong.any():
        first = int(wrong.int().argmax())
        place = f"row {int(rows[first])}, column {int(columns[first])}"
        raise InputError(f"{what} has NaN or Inf in {place}: remove the row or fill the gap")
    return canonical(rows, columns, values, (shape[0], shape[1]))


def check_not_standardised(x: Tensor, standardise: bool) -> None:
    """Refuse to standardise sparse rows: a mean that is taken off would make them dense."""
    if standardise and is_csr(x):
        raise InputError(
            "standardise=True would make sparse rows dense, got a sparse x: scale its columns "
            "yourself, or make it dense (scipy: x.toarray())"
        )


def digested(x: Tensor) -> list[Tensor]:
    """The tensors whose bytes identify some samples: the samples, or the arrays of sparse ones."""
    return list(entries(x)) if is_csr(x) else [x]
