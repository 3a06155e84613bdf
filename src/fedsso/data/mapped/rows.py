"""Rows in memory-mapped files, as a tensor that reads only what is taken of it.

`MappedRows` has the shape and type of all rows, and no memory. `x[rows]` reads these rows from the
files and returns an ordinary tensor. The operating system keeps as much of the files in memory as
there is room for, so that they may be larger than the memory.

What is taken of it is checked and prepared on the way: a number that is not finite is an error that
names its row, and a table that is standardised is so from then on. All else that one can do with a
tensor is refused, with a sentence that says what to do instead. Above all nothing can write into
it: the files are mapped for reading, and writing there would end the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from mmap import mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import InputError

Array = np.ndarray[Any, Any]
Prepare = Callable[[Any], Tensor]
aten = torch.ops.aten

PIECE = 16 << 20  # bytes that are read at a time where all rows are needed

# Types of numpy whose numbers stay as they are; other numbers become float32.
TYPES = {
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.float16): torch.float16,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.longdouble): torch.float64,
}


class Place(NamedTuple):
    """Where an array lies in a file, from which another process can map it again."""

    path: str
    offset: int  # bytes before its first number
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def open(self) -> Array:
        """The array, mapped for reading."""
        whole = np.memmap(self.path, np.uint8, "r")
        dtype = np.dtype(self.dtype)
        return np.ndarray(self.shape, dtype, whole, self.offset, self.strides)


def is_mapped(values: object) -> bool:
    """Whether these are rows in files: a numpy array that is mapped, a view of one, or our own.

    >>> is_mapped(np.zeros(3))
    False
    """
    if isinstance(values, MappedRows):
        return True
    while isinstance(values, np.ndarray):
        values = values.base
    return isinstance(values, mmap)


class MappedRows(Tensor):
    """Rows [rows, *sample] in one mapped array or several, one after the other.

    Args:
        parts: The arrays, whose samples have one shape and type.
        prepare: What makes of rows as they are stored what the tensor holds, float32. Without it
            they are what is stored; integers other than uint8 become float32.
        gaps: Whether NaN is allowed in what is stored.

    >>> x = MappedRows([np.array([[1.0], [2.0]]), np.array([[3.0]])])
    >>> x
    MappedRows(3 rows in 2 files, sample 1 float64)
    >>> x[torch.tensor([2, 0])]
    tensor([[3.],
            [1.]], dtype=torch.float64)
    """

    parts: tuple[Array, ...]
    prepare: Prepare | None
    gaps: bool
    starts: np.ndarray[Any, np.dtype[np.int64]]

    @staticmethod
    def __new__(
        cls: type[MappedRows],
        parts: Sequence[Array],
        prepare: Prepare | None = None,
        gaps: bool = False,
    ) -> MappedRows:
        """Make the tensor; nothing is read."""
        first = parts[0]
        stored = TYPES.get(first.dtype.newbyteorder("="), torch.float32)
        starts = np.cumsum([0, *map(len, parts)])
        made: MappedRows = torch.Tensor._make_wrapper_subclass(
            cls,
            (int(starts[-1]), *first.shape[1:]),
            dtype=stored if prepare is None else torch.float32,
        )
        made.parts = tuple(parts)
        made.prepare = prepare
        made.gaps = gaps
        made.starts = starts
        return made

    # ---- reading ----

    def take(self, rows: Tensor | Sequence[int]) -> Tensor:
        """The rows of these numbers, [len(rows), *sample].

        Raises:
            InputError: There is no such row, or one holds NaN or infinite numbers.
        """
        numbers = torch.as_tensor(rows, dtype=torch.int64).cpu()
        wanted = numbers.numpy()
        total = len(self)
        wrong = (wanted < -total) | (wanted >= total)
        if wrong.any():
            first = wanted[wrong][0]
            raise InputError(f"row must be in 0..{total - 1}, got {first}")
        wanted = np.where(wanted < 0, wanted + total, wanted)
        return self._usable(self._stored(wanted), lambda place: int(wanted[place]))

    def span(self, begin: int, end: int) -> Tensor:
        """The rows from `begin` to `end` - 1, read from the files one after the other."""
        pieces = []
        for part, start in zip(self.parts, self.starts.tolist(), strict=False):
            low = max(begin - start, 0)
            high = min(end - start, len(part))
            if low < high:
                pieces.append(part[low:high])
        stored = np.concatenate(pieces or [self.parts[0][:0]])
        return self._usable(stored, lambda place: begin + place)

    def _stored(self, rows: np.ndarray[Any, np.dtype[np.int64]]) -> Array:
        """Rows as the files have them, in the order of the numbers."""
        if len(self.parts) == 1:
            return np.array(self.parts[0].take(rows, 0))
        which = np.searchsorted(self.starts, rows, "right") - 1
        first = self.parts[0]
        out = np.empty((len(rows), *first.shape[1:]), first.dtype)
        for part in np.unique(which).tolist():
            mine = np.flatnonzero(which == part)
            out[mine] = self.parts[part][rows[mine] - self.starts[part]]
        return out

    def _usable(self, stored: Array, number: Callable[[int], int]) -> Tensor:
        """Stored rows as the tensor holds them; `number` tells which row is at a place."""
        kind = TYPES.get(stored.dtype.newbyteorder("="), torch.float32)
        numpy_kind = torch.empty(0, dtype=kind).numpy().dtype
        made = torch.from_numpy(np.ascontiguousarray(stored, numpy_kind))
        if not made.is_floating_point() or not len(made):
            return made
        if self.gaps:
            _check(
                ~made.isinf(), "x has Inf", "remove the row, or mark it as missing with NaN", number
            )
        else:
            remedy = (
                "remove the row or fill in the value; in a table standardise=True fills "
                "missing values"
            )
            _check(made.isfinite(), "x has NaN or Inf", remedy, number)
        if self.prepare is None:
            return made
        made = self.prepare(made)
        _check(made.isfinite(), "x, standardised, has NaN or Inf", "remove the row", number)
        return made

    # ---- as a tensor ----

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer what torch asks of it: rows by numbers, by a mask, or by a span."""
        del types
        x, *rest = args
        if func in (aten.detach.default, aten.alias.default):
            return x
        if isinstance(x, MappedRows) and not kwargs:
            taken = _taken(x, func, rest)
            if taken is not None:
                return taken
        raise InputError(
            f"these rows lie in files, and {func} would read them all: take some by their "
            f"numbers first, as in fed.x[rows]"
        )

    def __setitem__(self, index: object, value: object) -> None:
        """Refuse to write: torch would write into a copy of the rows, which nobody sees."""
        raise InputError(
            f"these rows lie in files, which are not written into, got x[{index!r}] = {value!r}: "
            f"take a copy first, as in fed.x[rows]"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        sample = "×".join(map(str, self.shape[1:]))
        kind = str(self.dtype).removeprefix("torch.")
        return f"MappedRows({len(self)} rows in {len(self.parts)} files, sample {sample} {kind})"

    def __deepcopy__(self, memo: object) -> MappedRows:
        return self

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Another process maps the same files; an array without a file travels as it is."""
        places = [_place(part) for part in self.parts]
        return _again, (places, self.prepare, self.gaps)


def _taken(x: MappedRows, func: Any, rest: Sequence[Any]) -> Tensor | None:
    """What an operation of torch takes of the rows; None if it does something else."""
    if func is aten.index.Tensor and len(rest[0]) == 1:
        (index,) = rest[0]
        if index.dtype == torch.bool:
            index = index.nonzero().flatten()
        return x.take(index.flatten()).view(*index.shape, *x.shape[1:])
    if func is aten.index_select.default and rest[0] == 0:
        return x.take(rest[1])
    if func is aten.select.int and rest[0] == 0:
        return x.take([rest[1]])[0]
    if func is aten.slice.Tensor and (not rest or rest[0] == 0):
        numbers = range(len(x))[slice(*rest[1:])]
        if numbers.step == 1:
            return x.span(numbers.start, max(numbers.start, numbers.stop))
        return x.take(list(numbers))
    return None


def _check(
    good: Tensor,
    problem: str,
    remedy: str,
    number: Callable[[int], int],
) -> None:
    """Raise InputError that names the first row, and in a table the column, which is not good."""
    rows = good.flatten(1).all(1)
    if rows.all():
        return
    place = int(rows.int().argmin())
    where = f"row {number(place)}"
    if good.ndim == 2:
        where += f", column {int(good[place].int().argmin())}"
    raise InputError(f"{problem} in {where}: {remedy}")


def _place(array: Array) -> Place | Array:
    """Where an array lies in its file; the array itself if it is not in one as it is.

    A map in mode "c" holds changes that the file does not have.
    """
    whole: Any = array
    while isinstance(whole, np.ndarray) and isinstance(whole.base, np.ndarray):
        whole = whole.base
    path = getattr(whole, "filename", None)
    if path is None or whole.mode == "c" or min(array.strides, default=0) < 0:
        return np.array(array)
    begin = array.__array_interface__["data"][0]
    begin_of_whole = whole.__array_interface__["data"][0]
    return Place(
        path=str(Path(path).resolve()),
        offset=int(whole.offset + begin - begin_of_whole),
        dtype=array.dtype.str,
        shape=array.shape,
        strides=array.strides,
    )


def _again(
    places: Sequence[Place | Array],
    prepare: Prepare | None,
    gaps: bool,
) -> MappedRows:
    """The rows in these places."""
    parts = [one.open() if isinstance(one, Place) else one for one in places]
    return MappedRows(parts, prepare, gaps)
