"""The reader of svmlight files, the format of the LIBSVM collection.

A line is one row: its label, then "index:value" for each feature that is not zero. Indices begin
with 1 and rise. A # begins a comment:

    -1 1:0.5 3:-2
    +1 2:0.001  # a comment

The rows are kept sparse while the files are read, and made dense at the end, unless they are to
stay sparse: only then is it known how many features there are.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, integer
from ..support.intake import limits, lines
from ..support.sparse import canonical
from .options import COLUMNS, LAYOUT
from .pool import Pool
from .tables import EXACT, Array, finite, numbered

INT32 = 2**31 - 1
"""The largest feature number that the arrays here can hold."""


class Row(NamedTuple):
    """One line of a file."""

    label: float
    """The first word of the line."""
    indices: list[int]
    """The feature numbers, from 1, rising."""
    values: list[float]
    """The values of these features."""


class Sparse(NamedTuple):
    """The rows of one file. Row i has the next sizes[i] entries of `columns` and `values`."""

    y: Array
    """The labels, [rows]."""
    sizes: Array
    """How many entries each row has, [rows]."""
    columns: Array
    """The feature numbers, from 1, [entries]."""
    values: Array
    """The features' values, [entries]."""


def svmlight(
    paths: Sequence[Path],
    *,
    dim: int = COLUMNS.default,
    layout: str | None = LAYOUT.default,
) -> Pool:
    """Read svmlight files, plain or packed by gzip, bzip2 or xz, and pool them in order.

    Args:
        paths: The files, at least one.
        dim: The number of features. 0 takes the largest index in the files.
        layout: "dense", or "sparse" for rows that stay sparse. None: dense, if that is within the
            limit of cells.

    Returns:
        The rows: x float32 [rows, dim], sparse ones in layout CSR. Labels that are whole numbers
        are numbered from 0 in sorted order, and a note tells so. Other labels are real targets.

    Raises:
        InputError: A line cannot be read. The message names the file and the line.
    """
    most = integer("dim", dim, 0, limits().columns)
    parts = [_read(path, most) for path in paths]
    if not parts:
        raise InputError("svmlight needs at least 1 file, got 0")
    _check_same_labels(paths, parts)
    y = np.concatenate([part.y for part in parts])
    width = most
    if not width:
        largest = [int(part.columns.max(initial=0)) for part in parts]
        width = max(largest)
    if not width:
        raise InputError(f"{paths[0]}: has no feature in any row, need at least 1")
    rows = len(y)
    label, notes = numbered(y)
    if layout == "sparse" or (layout is None and rows * width > limits().cells):
        return Pool(_kept_sparse(parts, rows, width), label, notes=notes)
    what = f"numbers, {rows} rows of {width} features"
    limits().check("cells", rows * width, paths[0], what)
    x = torch.from_numpy(_filled(parts, rows, width))
    return Pool(x, label, notes=notes)


def _kept_sparse(parts: Sequence[Sparse], rows: int, width: int) -> Tensor:
    """The rows of all files as one sparse matrix, float32 [rows, width]."""
    sizes = torch.from_numpy(np.concatenate([part.sizes for part in parts]))
    columns = torch.from_numpy(np.concatenate([part.columns for part in parts]) - 1)
    values = torch.from_numpy(np.concatenate([part.values for part in parts]))
    row_of_entry = torch.arange(rows).repeat_interleave(sizes)
    return canonical(row_of_entry, columns, values, (rows, width))


def _filled(parts: Sequence[Sparse], rows: int, width: int) -> Array:
    """The rows of all files as one dense array, float32 [rows, width]. What is not given is 0."""
    x = np.zeros((rows, width), np.float32)
    start = 0
    for part in parts:
        count = len(part.y)
        end = start + count
        own = x[start:end]
        row_of_entry = np.repeat(np.arange(count), part.sizes)
        column_of_entry = part.columns - 1
        own[row_of_entry, column_of_entry] = part.values
        start = end
    return x


def _read(path: Path, most: int) -> Sparse:
    """Read one file.

    The rows are kept in arrays of plain numbers, which take far less memory than lists. The
    limits of columns and cells are checked while the file is read, before it fills the memory.

    Args:
        path: The file, which may be packed.
        most: The largest feature number that is allowed. 0 allows any.

    Raises:
        InputError: A line is wrong, the file has no rows, or it is beyond a limit.
    """
    y = array("d")
    sizes = array("i")
    columns = array("i")
    values = array("f")
    bound = limits()
    for where, tokens in _tokens(path):
        row = _row(tokens, most or INT32, where)
        largest = row.indices[-1] if row.indices else 0
        if largest > bound.columns:
            raise bound.beyond("columns", where, f"has {largest} columns")
        entries = len(columns) + len(row.indices)
        if entries > bound.cells:
            has = f"has more than {bound.cells} numbers up to here"
            raise bound.beyond("cells", where, has)
        y.append(row.label)
        sizes.append(len(row.indices))
        columns.extend(row.indices)
        values.extend(row.values)
    if not y:
        raise InputError(f"{path}: has no rows, need at least 1")
    return Sparse(
        _as_array(y),
        _as_array(sizes),
        _as_array(columns),
        _as_array(values),
    )


def _tokens(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Where each row is, for messages, and the words of its line without the comment.

    Lines without a word are passed over. latin-1 gives every byte a character, so that a comment
    in any encoding does no harm.
    """
    for number, text in enumerate(lines(path), start=1):
        if text == b"\n":
            continue
        code, _, _comment = text.decode("latin-1").partition("#")
        tokens = code.split()
        if tokens:
            yield f"{path}: line {number}", tokens


def _as_array(numbers: array[float] | array[int]) -> Array:
    """The numbers as an array of numpy, in the same memory."""
    if not numbers:
        return np.zeros(0, numbers.typecode)
    return np.frombuffer(numbers, numbers.typecode)


def _row(tokens: Sequence[str], most: int, where: str) -> Row:
    """One row from the words of its line.

    Args:
        tokens: The words, at least one.
        most: The largest feature number that is allowed.
        where: The beginning of an error message.

    Raises:
        InputError: The label is no number or too large to be told apart from others, an entry is
            wrong, or the indices do not rise from 1 to at most `most`.
    """
    try:
        label = finite(tokens[0])
    except ValueError:
        raise InputError(f"{where}: has {tokens[0]!r} as label, expected a number") from None
    indices = []
    values = []
    for token in tokens[1:]:
        index, value = _entry(token, where)
        indices.append(index)
        values.append(value)
    for before, index in pairwise((0, *indices)):
        if index <= before:
            raise InputError(
                f"{where}: has feature {index} after {before}, expected indices from 1 in rising "
                f"order"
            )
    largest = indices[-1] if indices else 0
    if largest > most:
        raise InputError(f"{where}: has feature {largest}, expected at most dim={most}")
    if abs(label) >= EXACT:
        raise InputError(
            f"{where}: has a label of 2^53 or more, where labels run together: number them from 0"
        )
    return Row(label, indices, values)


def _entry(token: str, where: str) -> tuple[int, float]:
    """The index and the value of one entry, such as 3:0.5."""
    index, _, value = token.partition(":")
    try:
        if not index.isdecimal():
            raise ValueError
        return int(index), finite(value)
    except ValueError:
        rule = "expected index:value as in 3:0.5"
        if index == "qid":
            rule = "queries are not supported: remove them"
        raise InputError(f"{where}: has {token!r}, {rule}") from None


def _check_same_labels(paths: Sequence[Path], parts: Sequence[Sparse]) -> None:
    """Raise InputError for files that write two classes differently, such as -1/1 and 0/1.

    Pooled, they would look like three classes.
    """
    kinds = [set(part.y.tolist()) for part in parts]
    together = set().union(*kinds)
    most = max(map(len, kinds))
    if most != 2 or len(together) <= 2:
        return
    told = []
    for path, kind in zip(paths, kinds, strict=True):
        labels = [f"{label:g}" for label in sorted(kind)]
        told.append(f"{path} has {'/'.join(labels)}")
    ways = "; ".join(told)
    raise InputError(f"two classes are written in different ways: {ways}: number them alike")
