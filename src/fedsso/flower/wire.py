"""The model on the wire: named arrays.

The arrays that are trained make up the vector x of parameters. The others are averaged: BatchNorm's
statistics, and counts, which are integers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from torch import Tensor

from ..errors import InputError
from ..objective import Layout

Values = NDArray[Any]
"""An array of any type and shape."""
Arrays = dict[str, Values]
"""Arrays by name."""
Given = Mapping[str, Values]
"""Arrays by name, which are only read."""
BUFFERS = ("*running_mean", "*running_var", "*num_batches_tracked")
"""The names of BatchNorm's statistics, which a server averages and never steps."""

Like = tuple[tuple[int, ...], np.dtype[Any]]
"""The shape and type of an array."""

# The kinds of arrays.
UPDATE = "update"
STATISTICS = "statistics"
COUNTS = "counts"


def arrays_of(record: ArrayRecord) -> Arrays:
    """The arrays of Flower's record, by name.

    They are decoded from bytes anew with each call, so keep the result if it is needed twice.
    """
    return {name: array.numpy() for name, array in record.items()}


def same(a: ArrayRecord, b: ArrayRecord) -> bool:
    """Whether two records hold the same arrays in the same order, to the bit."""
    left = arrays_of(a)
    right = arrays_of(b)
    if list(left) != list(right):
        return False
    return all(np.array_equal(left[name], right[name]) for name in left)


class Model:
    """How the arrays of one model become the vector x [d], and back.

    x holds the trained arrays one after the other, in the order of the record. Its type is float64
    if one of them is, and otherwise float32. A model of float16 is thus stepped in float32.

    >>> model = Model({"w": np.ones((2, 2), np.float32), "bn.running_mean": np.zeros(2)})
    >>> model.params, model.kinds["bn.running_mean"]
    (['w'], 'statistics')
    """

    like: dict[str, Like]
    """The shape and type of each array."""
    params: list[str]
    """The names of the arrays that x consists of."""
    sizes: list[int]
    """How many numbers each of these has."""
    kinds: dict[str, str]
    """The kind of each array: UPDATE for a part of x, STATISTICS of the data, or COUNTS."""
    dtype: torch.dtype
    """The type of x."""

    def __init__(
        self,
        arrays: Given,
        buffers: Sequence[str] = BUFFERS,
    ) -> None:
        """Look at the arrays of a model.

        Args:
            arrays: The initial model, by name.
            buffers: Patterns of the names of arrays that are averaged and never stepped.

        Raises:
            InputError: An array holds other than real and finite numbers, or nothing is trainable.
        """
        odd = [name for name, array in arrays.items() if not _is_real_and_finite(array)]
        if odd:
            raise InputError(
                f"the model's {', '.join(odd)} must hold real and finite numbers; check the "
                f"initial arrays"
            )
        self.like = {}
        self.params = []
        self.sizes = []
        self.kinds = {}
        self.dtype = torch.float32
        for name, array in arrays.items():
            self.like[name] = (array.shape, array.dtype)
            self.kinds[name] = _kind(name, array, buffers)
            if self.kinds[name] == UPDATE:
                self.params.append(name)
                self.sizes.append(array.size)
                if array.dtype == np.float64:
                    self.dtype = torch.float64
        if not sum(self.sizes):
            raise InputError(
                f"the model has no trainable array among {list(arrays)}; give "
                f"ArrayRecord(net.state_dict())"
            )

    @property
    def layout(self) -> Layout:
        """Where the parameters lie in x.

        Of arrays without names, each one with more axes than one begins a layer.
        """
        names = []
        layer = 0
        for name in self.params:
            layer += len(self.like[name][0]) > 1
            names.append(f"{layer}.{name}" if name.isdigit() else name)
        return Layout(tuple(names), tuple(torch.Size(self.like[name][0]) for name in self.params))

    def ravel(self, arrays: Given) -> Tensor:
        """The parameters as one vector x [d]."""
        dtype = str(self.dtype).removeprefix("torch.")
        parts = []
        for name in self.params:
            flat = np.array(arrays[name]).reshape(-1)
            parts.append(torch.from_numpy(flat.astype(dtype)))
        return torch.cat(parts)

    def record(self, x: Tensor, mean: Given) -> ArrayRecord:
        """The model with x as its parameters. Everything else is that of `mean`.

        The arrays get the shapes and types of the initial model. A narrow type can turn a large
        number into infinity, which the caller must look for.
        """
        parts = x.cpu().split_with_sizes(self.sizes)
        part_of = dict(zip(self.params, parts, strict=True))
        arrays = {}
        for name in self.like:
            if name in part_of:
                value = self._parameter(name, part_of[name])
            else:
                value = self._buffer(name, mean[name])
            arrays[name] = Array(value)
        return ArrayRecord(arrays)

    def _parameter(self, name: str, part: Tensor) -> Values:
        """A part of x in the shape and type of the model's array."""
        shape, dtype = self.like[name]
        with np.errstate(over="ignore"):  # the caller looks for infinity
            return part.numpy().astype(dtype).reshape(shape)

    def _buffer(self, name: str, mean: Values) -> Values:
        """An averaged array in the shape and type of the model's. A mean of integers is rounded."""
        shape, dtype = self.like[name]
        value = np.asarray(mean)
        if dtype.kind in "iub" and value.dtype.kind == "f":
            value = np.rint(value)
        return np.asarray(value, dtype).reshape(shape)


def _is_real_and_finite(array: Values) -> bool:
    """Whether an array holds real numbers, and no NaN or infinite ones."""
    if array.dtype.kind not in "fiub":
        return False
    return bool(np.isfinite(array).all())


def _kind(name: str, array: Values, buffers: Sequence[str]) -> str:
    """What an array is. `buffers` are patterns of the names of statistics."""
    if array.dtype.kind != "f":
        return COUNTS
    if any(fnmatchcase(name, pattern) for pattern in buffers):
        return STATISTICS
    return UPDATE
