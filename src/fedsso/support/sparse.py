"""Sparse rows: matrices that hold the numbers which are not zero, as tensors of layout CSR.

CSR, "compressed sparse rows", is three arrays. Row i has the entries start[i] to start[i + 1] - 1
of `columns` and `values`. So memory and work go with the entries, whatever the width.

Torch has CSR tensors and fast products of them with dense vectors and matrices, on CPUs and GPUs,
and little else: rows are selected here, by their entries. Numbers of rows and columns are int32
wherever they fit, as the products want them.

    rows       row numbers [M, B] of M clients, B for each
    blocks     a matrix [M B, M width] with the rows of client m in block m of its diagonal
    transposed its transpose, as CSR as well: products with it are as fast
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

INT32 = 2**31 - 1


class Entries(NamedTuple):
    """The three arrays of a CSR matrix."""

    start: Tensor  # [rows + 1]
    columns: Tensor  # [entries]
    values: Tensor  # [entries]


def is_csr(x: Any) -> bool:
    """Whether it is a tensor of layout CSR."""
    return isinstance(x, Tensor) and x.layout == torch.sparse_csr


def entries(x: Tensor) -> Entries:
    """The arrays of a CSR matrix, without a copy."""
    return Entries(x.crow_indices(), x.col_indices(), x.values())


def csr(start: Tensor, columns: Tensor, values: Tensor, width: int) -> Tensor:
    """A CSR matrix of so many columns from its arrays, which are not checked.

    >>> start, columns = torch.tensor([0, 1, 1]), torch.tensor([2])
    >>> csr(start, columns, torch.tensor([5.0]), 3).to_dense()
    tensor([[0., 0., 5.],
            [0., 0., 0.]])
    """
    _without_warning()
    size = (len(start) - 1, width)
    index = torch.int32 if max(len(values), *size) <= INT32 else torch.int64
    return _made(start.to(index), columns.to(index), values, size)


def _made(start: Tensor, columns: Tensor, values: Tensor, size: tuple[int, int]) -> Tensor:
    """The tensor itself."""
    return torch.sparse_csr_tensor(start, columns, values, size, check_invariants=False)


@cache
def _without_warning() -> None:
    """Make a first CSR tensor: torch warns at the first one of a process that they are new."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _made(torch.tensor([0, 0]), torch.tensor([], dtype=torch.int64), torch.tensor([]), (1, 1))


def canonical(rows: Tensor, columns: Tensor, values: Tensor, size: tuple[int, int]) -> Tensor:
    """A CSR matrix from entries in any order: sorted, repeats added up, zeros left out.

    Args:
        rows: The row of each entry, [entries].
        columns: Its column.
        values: Its value.
        size: The numbers of rows and columns.
    """
    height, width = size
    place = rows.long() * width + columns
    if not (place.diff() > 0).all():
        place, where = torch.unique(place, return_inverse=True)
        values = values.new_zeros(len(place)).index_add_(0, where, values)
    kept = values != 0
    place = place[kept]
    counts = torch.bincount(place // width, minlength=height)
    return csr(_starts(counts), place % width, values[kept], width)


def rows_of_entries(x: Tensor) -> Tensor:
    """The row of each entry of a CSR matrix, [entries]."""
    start, columns, _ = entries(x)
    numbers = torch.arange(len(x), dtype=columns.dtype, device=columns.device)
    return numbers.repeat_interleave(start.diff(), output_size=len(columns))


def _starts(counts: Tensor) -> Tensor:
    """Where each row begins, from the numbers of entries of the rows."""
    zero = counts.new_zeros(1)
    return torch.cat((zero, counts.cumsum(0)))


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """CSR matrices of one width below each other."""
    each = [entries(part) for part in parts]
    counts = torch.cat([one.start.diff() for one in each])
    columns = torch.cat([one.columns for one in each])
    values = torch.cat([one.values for one in each])
    return csr(_starts(counts.long()), columns, values, parts[0].shape[1])


def _picked(x: Tensor, rows: Tensor, present: Tensor | None) -> tuple[Tensor, Entries]:
    """The entries of some rows, and how many each has; none for rows that are not present."""
    start, columns, values = entries(x)
    first = start.index_select(0, rows)
    counts = start.index_select(0, rows + 1) - first
    if present is not None:
        counts = counts * present
    begins = _starts(counts.long())
    total = int(begins[-1])
    # The entries of row i lie first[i] - begins[i] places further on in x.
    shift = (first - begins[:-1]).repeat_interleave(counts, output_size=total)
    place = torch.arange(total, device=shift.device).add_(shift)
    return counts, Entries(begins, columns.index_select(0, place), values.index_select(0, place))


def select(x: Tensor, rows: Tensor) -> Tensor:
    """Some rows of a CSR matrix, [n, width], for row numbers [n].

    >>> x = torch.eye(3).to_sparse_csr()
    >>> select(x, torch.tensor([2, 0])).to_dense()
    tensor([[0., 0., 1.],
            [1., 0., 0.]])
    """
    _, picked = _picked(x, rows, None)
    return csr(*picked, x.shape[1])


def blocks(x: Tensor, rows: Tensor, present: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The rows [M, B] of M clients as one block-diagonal matrix [M B, M width] of a type.

    Where `present` [M, B] is false a row has no entries, which is what padding needs.
    """
    clients, each = rows.shape
    width = x.shape[1]
    shown = None if present is None else present.reshape(-1)
    counts, (start, columns, values) = _picked(x, rows.reshape(-1), shown)
    if clients > 1:
        block = torch.arange(clients, device=rows.device).repeat_interleave(each) * width
        columns = columns + block.repeat_interleave(counts, output_size=len(columns))
    return csr(start, columns, values.to(dtype), clients * width)


def transposed(x: Tensor) -> Tensor:
    """The transpose of a CSR matrix, as CSR.

    The sort is stable: entries of a column stay in the order of the rows, so that sums have the
    same order in every run.
    """
    _, columns, values = entries(x)
    height, width = x.shape
    order = torch.argsort(columns, stable=True)
    rows = rows_of_entries(x).index_select(0, order)
    start = _starts(torch.bincount(columns, minlength=width))
    return csr(start, rows, values.index_select(0, order), height)


def by_client(x: Tensor, clients: int, ones: int = 0) -> Tensor:
    """A block-diagonal matrix [M B, M width] as dense rows [M, B, width + ones] of M clients.

    The last `ones` columns hold 1 everywhere.
    """
    _, columns, values = entries(x)
    width = x.shape[1] // clients
    dense = values.new_zeros(len(x), width + ones)
    dense[rows_of_entries(x).long(), columns.long() % width] = values
    dense[:, width:] = 1
    return dense.view(clients, -1, width + ones)
