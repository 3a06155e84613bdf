"""The model on the wire: named arrays, of which the parameters make up the vector x and the rest is
averaged."""

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

Arrays = dict[str, NDArray[Any]]
BUFFERS = ("*running_mean", "*running_var", "*num_batches_tracked")
"""Names of BatchNorm's statistics, which a server averages and never steps."""
UPDATE, STATISTICS, COUNTS = "update", "statistics", "counts"  # kinds of arrays


def arrays_of(record: ArrayRecord) -> Arrays:
    """A record's arrays by name."""
    return {name: array.numpy() for name, array in record.items()}


def same(a: ArrayRecord, b: ArrayRecord) -> bool:
    """Whether two records hold the same arrays, to the bit."""
    left, right = arrays_of(a), arrays_of(b)
    return list(left) == list(right) and all(np.array_equal(left[n], right[n]) for n in left)


class Model:
    """How the arrays of one model become x [d] and back."""

    def __init__(
        self, arrays: Mapping[str, NDArray[Any]], buffers: Sequence[str] = BUFFERS
    ) -> None:
        odd = [
            name
            for name, a in arrays.items()
            if a.dtype.kind not in "fiub" or not np.isfinite(a).all()
        ]
        if odd:
            raise InputError(
                f"the model's {', '.join(odd)} must hold real and finite numbers; check the "
                f"initial arrays"
            )
        self.like = {name: (a.shape, a.dtype) for name, a in arrays.items()}
        self.params = [name for name, a in arrays.items() if not _averaged(name, a, buffers)]
        if not sum(arrays[name].size for name in self.params):
            raise InputError(
                f"the model has no trainable array among {list(arrays)}; give "
                f"ArrayRecord(net.state_dict())"
            )
        self.sizes = [arrays[name].size for name in self.params]
        self.kinds = {name: self._kind(name, a) for name, a in arrays.items()}
        wide = any(arrays[name].dtype == np.float64 for name in self.params)
        self.dtype = torch.float64 if wide else torch.float32

    def _kind(self, name: str, array: NDArray[Any]) -> str:
        """What an array is: a part of x, statistics of the data, or a count."""
        if array.dtype.kind != "f":
            return COUNTS
        return UPDATE if name in self.params else STATISTICS

    def ravel(self, arrays: Mapping[str, NDArray[Any]]) -> Tensor:
        """The parameters as one vector."""
        parts = [
            torch.from_numpy(
                np.array(arrays[name]).reshape(-1).astype(str(self.dtype).removeprefix("torch."))
            )
            for name in self.params
        ]
        return torch.cat(parts)

    def record(self, x: Tensor, mean: Mapping[str, NDArray[Any]]) -> ArrayRecord:
        """The model with x as its parameters; everything else is that of `mean`."""
        parts = dict(zip(self.params, x.cpu().split_with_sizes(self.sizes), strict=True))
        return ArrayRecord(
            {name: Array(self._array(name, parts.get(name), mean)) for name in self.like}
        )

    def _array(
        self, name: str, part: Tensor | None, mean: Mapping[str, NDArray[Any]]
    ) -> NDArray[Any]:
        shape, dtype = self.like[name]
        if part is not None:
            with np.errstate(over="ignore"):  # the caller looks for infinity
                return part.numpy().astype(dtype).reshape(shape)
        value = np.asarray(mean[name])
        whole = dtype.kind in "iub" and value.dtype.kind == "f"
        return np.asarray(np.rint(value) if whole else value, dtype).reshape(shape)


def _averaged(name: str, array: NDArray[Any], buffers: Sequence[str]) -> bool:
    """Whether an array is a buffer: a count, or one that goes by such a name."""
    return array.dtype.kind != "f" or any(fnmatchcase(name, pattern) for pattern in buffers)
