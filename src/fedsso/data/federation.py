"""A federation: every row stored once, a client is a set of row indices.

Symbols: N clients, n_i training rows of client i, p_i its weight (n_i / sum n unless given).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, integer, number, one_of
from ..support.rng import generator
from .tables import MISSING, Files, csv_pool


class Scaling(NamedTuple):
    """What standardises a table: gaps (NaN) take the median, then a column is (x - mean) * factor;
    float64 each."""

    median: Tensor
    mean: Tensor
    factor: Tensor  # 1 / deviation; 0 for a constant column
    columns: tuple[str, ...] = ()  # their names, where they have any

    def __call__(self, x: Any) -> Tensor:
        """One row or several as the model knows them, float32 [rows, columns]; a data frame by its
        column names."""
        if self.columns and hasattr(x, "columns"):
            absent = [name for name in self.columns if name not in x.columns]
            if absent:
                raise InputError(
                    f"x lacks the columns {', '.join(absent)}: the model was trained on "
                    f"{self.columns}"
                )
            x = x[list(self.columns)]
        rows = dense(x, "x").double()
        rows = rows if rows.ndim > 1 else rows[None]
        if rows.shape[-1] != len(self.mean):
            raise InputError(
                f"x must have {len(self.mean)} columns, as the training rows have, got "
                f"{rows.shape[-1]}"
            )
        filled = torch.where(rows.isnan(), self.median, rows)
        return ((filled - self.mean) * self.factor).float()


@dataclass(frozen=True, eq=False)
class Federation:
    """Rows and who holds them. Build one with `load`, `from_arrays`, `from_clients`, `from_csv` or
    `from_rows`.

    With standardise=True gaps (NaN) in a table x are filled with the column's median, then columns
    are scaled to mean 0 and deviation 1. Medians and moments are those of all clients' training
    rows together; over a network the moments would be two more averages, and a median a few.

    >>> Federation.from_clients([([[0.0], [1.0]], [0, 1]), ([[2.0]], [1])], test_fraction=0)
    Federation(own, 2 clients, 3 train + 0 test rows, sample 1 float64, 2 classes)
    """

    x: Tensor  # [rows, *sample], uint8 or floating
    y: Tensor  # [rows], int64 labels or floating targets
    train_rows: Tensor  # client i trains on train_rows[train_start[i]:train_start[i + 1]]
    train_start: Tensor
    test_rows: Tensor
    test_start: Tensor
    classes: int = 0  # 0: y is a real target
    affine: tuple[float, float] = (
        1.0,
        0.0,
    )  # a sample is x * affine[0] + affine[1], after widening
    weights: Tensor | None = None  # own p_i, float64; None: n_i / sum n
    name: str = "own"
    source: Mapping[str, object] = field(
        default_factory=dict
    )  # load(**source) rebuilds it; {}: own arrays
    client_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # where the federation differs from what was asked for
    scaling: Scaling | None = None  # of a standardised table: prepares new rows for the model
    optimum: Tensor | None = None  # the minimiser of sum p_i f_i, float64, where it is known

    @classmethod
    def from_rows(
        cls,
        x: Any,
        y: Any,
        rows: Iterable[Any],
        *,
        test_fraction: float = 0.25,
        seed: int = 0,
        classes: int | None = None,
        standardise: bool = False,
    ) -> Federation:
        """Client i holds the rows of x and y that rows[i] lists, or marks in a mask; a row has one
        holder at most."""
        test_fraction, seed = split_options(test_fraction, seed)
        x, y = dense(x, "x"), dense(y, "y")
        _same_length(x, y)
        x, (y, classes) = _samples(x, gaps=standardise), _targets(y, classes)
        _worth_storing(classes, len(y))
        if not classes:  # a loss compares model output and target in one precision
            y = y.to(x.dtype if x.is_floating_point() else torch.float32)
            _finite(y, f"y as {y.dtype}")
        lists = _listed(rows, "rows must list the row indices of each client")
        held = [_indices(own, len(x), i) for i, own in enumerate(lists)]
        _held_once(held, len(x))
        train, test = _split(held, test_fraction, seed)
        scaling = None
        if standardise:
            scaling = _scaling(x, torch.cat(train))
            x = scaling(x)
            _whole(x.isfinite(), "x, standardised, has NaN or Inf", "remove the row")
        return cls(x, y, *_pack(train), *_pack(test), classes=classes, scaling=scaling)

    @classmethod
    def from_arrays(
        cls,
        x: Any,
        y: Any,
        client_of_row: Any,
        *,
        test_fraction: float = 0.25,
        seed: int = 0,
        classes: int | None = None,
        weights: Any = None,
        standardise: bool = False,
    ) -> Federation:
        """Row j belongs to client client_of_row[j], an integer or a name; clients come in sorted
        order.

        Arrays of a dtype that is kept are shared with the caller, not copied.
        """
        x, y = dense(x, "x"), dense(y, "y")
        _same_length(x, y)
        names, rows = _group(client_of_row, len(x))
        options: Any = {
            "test_fraction": test_fraction,
            "seed": seed,
            "classes": classes,
            "standardise": standardise,
        }
        fed = cls.from_rows(x, y, rows, **options)
        return replace(fed, client_names=names, weights=client_weights(weights, len(names)))

    @classmethod
    def from_clients(
        cls,
        clients: Iterable[tuple[Any, Any]],
        *,
        test_fraction: float = 0.25,
        seed: int = 0,
        client_names: Sequence[str] = (),
        classes: int | None = None,
        weights: Any = None,
        standardise: bool = False,
    ) -> Federation:
        """One (x, y) pair per client."""
        given = _listed(clients, "clients must be one pair (x, y) per client")
        pairs = [_pair(pair, i, classes, standardise) for i, pair in enumerate(given)]
        _alike(pairs)
        names = _names(client_names, len(pairs))
        x, y = (torch.cat(part) for part in zip(*pairs, strict=True))
        rows = torch.arange(len(x)).split_with_sizes([len(part) for part, _ in pairs])
        options: Any = {
            "test_fraction": test_fraction,
            "seed": seed,
            "classes": classes,
            "standardise": standardise,
        }
        fed = cls.from_rows(x, y, rows, **options)
        return replace(fed, client_names=names, weights=client_weights(weights, len(pairs)))

    @classmethod
    def from_csv(
        cls,
        files: Files,
        target: str,
        *,
        features: Sequence[str] | None = None,
        group: str = "",
        missing: Sequence[str] = MISSING,
        standardise: bool = True,
        test_fraction: float = 0.25,
        seed: int = 0,
        classes: int | None = None,
    ) -> Federation:
        """One CSV file per client, as a folder, a list of paths or {name: path}; `target` is the
        column to predict.

        `features` are column names, by default all others of the first file; `missing` are the
        marks of a gap. With `group` a client is a value of that column instead of a file. Targets
        that are names, or all whole numbers, are labels, numbered from 0 in sorted order. classes=0
        takes any numbers as real targets; classes=n takes labels 0..n-1 as written.
        """
        pool = csv_pool(files, target, features, missing, classes, group)
        options: Any = {"test_fraction": test_fraction, "seed": seed, "standardise": standardise}
        names, rows = _in_order(pool.group)
        fed = cls.from_rows(pool.x, pool.y, rows, classes=classes or None, **options)
        scaling = fed.scaling and fed.scaling._replace(columns=pool.columns)
        return replace(fed, client_names=names, notes=pool.notes, scaling=scaling)

    @property
    def clients(self) -> int:
        return len(self.train_start) - 1

    @property
    def train_sizes(self) -> Tensor:
        return self.train_start.diff()

    @property
    def test_sizes(self) -> Tensor:
        return self.test_start.diff()

    @property
    def p(self) -> Tensor:
        """Client weights, float64 [N]."""
        sizes = self.train_sizes.double()
        return sizes / sizes.sum() if self.weights is None else self.weights

    @property
    def sample_shape(self) -> torch.Size:
        return self.x.shape[1:]

    def rows_of(self, i: int, part: str = "train") -> Tensor:
        """Row indices of client i's training or test part."""
        parts = {
            "train": (self.train_rows, self.train_start),
            "test": (self.test_rows, self.test_start),
        }
        rows, start = parts[one_of("part", part, parts)]
        if not 0 <= integer("client", i) < self.clients:
            raise InputError(f"client must be in 0..{self.clients - 1}, got {i}")
        return rows[int(start[i]) : int(start[i + 1])]

    def validation(self, fraction: float = 0.25, seed: int = 0) -> Federation:
        """The same clients without their test rows: a part of the training rows takes that place,
        to choose by."""
        fraction, seed = split_options(fraction, seed)
        train, held = _split([self.rows_of(i) for i in range(self.clients)], fraction, seed)
        (rows, start), (test_rows, test_start) = _pack(train), _pack(held)
        parts: Any = {
            "train_rows": rows,
            "train_start": start,
            "test_rows": test_rows,
            "test_start": test_start,
        }
        return replace(self, **parts, source={}, optimum=None)

    def to(self, device: torch.device | str) -> Federation:
        """The same federation with every tensor on a device."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        moved: dict[str, Any] = {name: v.to(device) for name, v in values if isinstance(v, Tensor)}
        return replace(self, **moved)

    def digest(self) -> str:
        """sha256 of everything training can see: rows, who holds them, scaling, weights."""
        hasher = sha256(repr((self.affine, self.classes)).encode())
        index = (self.train_rows, self.train_start, self.test_rows, self.test_start)
        for array in (self.x, self.y, *index, *([] if self.weights is None else [self.weights])):
            hasher.update(f"{array.dtype}{tuple(array.shape)}".encode())
            hasher.update(
                array.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
            )
        return hasher.hexdigest()

    def label_counts(self) -> Tensor:
        """Rows of each label that each client holds, training and test together: int64 [N,
        classes]."""
        if not self.classes:
            raise InputError(f"federation {self.name!r} has real targets, no labels to count")
        train, test = (
            _count(self.y, rows, start, self.classes)
            for rows, start in (
                (self.train_rows, self.train_start),
                (self.test_rows, self.test_start),
            )
        )
        return train + test

    def summary(self) -> str:
        """A plain-text table for people."""
        table = [("train rows", self.train_sizes), ("test rows", self.test_sizes)]
        if self.classes:
            table.append(("labels held", (self.label_counts() > 0).sum(1)))
        lines = [repr(self), f"{'per client':<12}{'min':>10}{'median':>10}{'max':>10}"]
        lines += [_spread(title, values) for title, values in table]
        if self.classes:
            lines.append(
                f"label skew  {label_skew(self.label_counts()).mean():.3f}  (0: all alike, near 1: "
                f"disjoint)"
            )
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.sample_shape))
        dtype = str(self.x.dtype).removeprefix("torch.")
        target = f"{self.classes} classes" if self.classes else "real target"
        rows = f"{len(self.train_rows)} train + {len(self.test_rows)} test rows"
        return f"Federation({self.name}, {self.clients} clients, {rows}, sample {shape} {dtype}, {target})"


def label_skew(counts: Tensor) -> Tensor:
    """Total-variation distance between each client's label distribution and that of all: float64
    [N]."""
    share = counts.double()
    own = share / share.sum(1, keepdim=True)
    return (own - share.sum(0) / share.sum()).abs().sum(1) / 2


def client_weights(weights: Any, clients: int) -> Tensor | None:
    """Own client weights, checked: one per client, none negative, summing to 1."""
    if weights is None:
        return None
    p = dense(weights, "weights").double()
    if p.shape != (clients,):
        raise InputError(
            f"weights has shape {tuple(p.shape)}, need one number for each of {clients} clients"
        )
    if not (p >= 0).all() or not abs(float(p.sum()) - 1) < 1e-9:
        raise InputError(
            f"weights must be >= 0 and sum to 1, got {p.tolist()}: divide them by their sum"
        )
    return p


def split_options(test_fraction: object, seed: object) -> tuple[float, int]:
    """What decides who is tested on what, checked."""
    fraction, draw = number("test_fraction", test_fraction), integer("seed", seed)
    if not 0 <= fraction < 1:
        raise InputError(f"test_fraction must be in [0, 1), got {test_fraction}")
    if not -(2**63) <= draw < 2**63:
        raise InputError(f"seed must be in -2**63..2**63-1, what 64 bits hold, got seed={draw}")
    return fraction, draw


def dense(values: Any, what: str) -> Tensor:
    """Anything array-like as a CPU tensor: float as it is, uint8 as it is; shared where torch can."""
    if isinstance(values, Tensor) and values.layout != torch.strided:
        raise InputError(f"{what} must be dense, got layout {values.layout}: use .to_dense()")
    if isinstance(values, Tensor) and values.dtype not in (
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ):
        tensor = values.detach().cpu()
    else:
        tensor = torch.from_numpy(_native(_array(values, what), what))
    if not tensor.ndim:
        raise InputError(f"{what} must be an array or a list, got {values!r}")
    if tensor.is_complex():
        raise InputError(f"{what} must be real, got dtype {tensor.dtype}")
    return tensor


def _array(values: Any, what: str) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(
            f"{what} is ragged or no array: every row needs the same shape ({error})"
        ) from None


def _native(array: np.ndarray[Any, Any], what: str) -> np.ndarray[Any, Any]:
    """The numbers in a dtype and a layout that torch computes with."""
    if array.dtype.kind not in "biuf":
        raise InputError(
            f"{what} must hold numbers, got dtype {array.dtype}: encode names, make sparse data "
            f"dense"
        )
    if array.dtype == np.uint64 and array.max(initial=0) >= 2**63:
        raise InputError(f"{what} must be < 2**63, got {array.max()}: pass smaller numbers")
    array = array.astype(array.dtype.newbyteorder("="), copy=not array.flags.writeable)
    if array.dtype in (
        np.uint16,
        np.uint32,
        np.uint64,
        np.longdouble,
    ):  # torch has no arithmetic for these
        array = array.astype(np.int64 if array.dtype.kind == "u" else np.float64)
    return np.require(array, requirements="C")


def _listed(values: Any, rule: str) -> list[Any]:
    try:
        return list(values)
    except TypeError:
        raise InputError(f"{rule}, got {values!r}") from None


def _names(given: Any, clients: int) -> tuple[str, ...]:
    names = _listed(given, f"client_names must name {clients} clients")
    if names and len(names) != clients:
        raise InputError(f"client_names must name {clients} clients, got {len(names)} names")
    return tuple(map(str, names))


def _spread(title: str, values: Tensor) -> str:
    least, median, most = (
        values.cpu().double().quantile(torch.tensor([0, 0.5, 1]).double()).tolist()
    )
    return f"{title:<12}{least:>10.0f}{median:>10g}{most:>10.0f}"


def _count(y: Tensor, rows: Tensor, start: Tensor, classes: int) -> Tensor:
    clients = len(start) - 1
    owner = torch.arange(clients, device=rows.device).repeat_interleave(start.diff())
    return torch.bincount(owner * classes + y[rows], minlength=clients * classes).view(
        clients, classes
    )


def _split(
    rows: Sequence[Tensor], test_fraction: float, seed: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Each client's rows, shuffled by its own draw, as (training, test); one row at least is for
    training."""
    train, test = [], []
    for i, own in enumerate(rows):
        shuffled = own[torch.randperm(len(own), generator=generator(seed, "split", i))]
        cut = min(round(test_fraction * len(own)), len(own) - 1)
        test.append(shuffled[:cut])
        train.append(shuffled[cut:])
    return train, test


def _pack(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    sizes = torch.tensor([0, *(len(part) for part in parts)])
    return torch.cat(list(parts)), sizes.cumsum(0)


def _samples(x: Tensor, where: str = "", *, gaps: bool = False) -> Tensor:
    """Samples in a dtype that is kept; gaps (NaN) are admitted in a table that is to be
    standardised."""
    if x.ndim < 2 or x.shape[1:].numel() == 0:
        raise InputError(
            f"{where}x must be [rows, features] or [rows, C, H, W], got shape {tuple(x.shape)}"
        )
    x = x if x.dtype == torch.uint8 or x.is_floating_point() else x.float()
    if gaps and (x.ndim != 2 or not x.is_floating_point()):
        got = f"{x.dtype} of shape {tuple(x.shape)}"
        raise InputError(
            f"{where}standardise needs a table x [rows, features] of floats, got {got}: leave it "
            f"out"
        )
    if gaps:
        _whole(~x.isinf(), f"{where}x has Inf", "remove the row, or make it NaN, a gap")
    elif x.is_floating_point():
        remedy = "remove the row or fill the gap; in a table standardise=True fills gaps"
        _whole(x.isfinite(), f"{where}x has NaN or Inf", remedy)
    return x


def _scaling(x: Tensor, train: Tensor) -> Scaling:
    """Medians and moments of the columns over the training rows, gaps filled; deviations are of the
    population."""
    columns = [_moments(column[train].double(), j) for j, column in enumerate(x.T)]
    median, mean, factor = (
        torch.tensor(part, dtype=torch.float64) for part in zip(*columns, strict=True)
    )
    return Scaling(median, mean, factor)


def _moments(column: Tensor, j: int) -> tuple[float, float, float]:
    """Median, mean and 1 / deviation (0 for a constant column)."""
    known = column[~column.isnan()]
    if not len(known):
        raise InputError(f"column {j} of x has no value in any training row: leave it out")
    median = float(np.median(known.numpy()))
    filled = torch.where(column.isnan(), median, column)
    low, high = map(float, filled.aminmax())
    if low == high:
        return median, low, 0.0
    largest = max(abs(low), abs(high))  # squares of numbers up to 1 do not overflow
    deviation, mean = torch.std_mean(filled / largest, correction=0)
    spread = float(deviation) * largest  # 0 if it is below what float64 can hold
    return median, float(mean) * largest, 1 / spread if spread else 0.0


def _targets(y: Tensor, classes: int | None, where: str = "") -> tuple[Tensor, int]:
    """(labels, number of classes) or (targets, 0)."""
    if y.ndim != 1:
        raise InputError(f"{where}y must be [rows], got shape {tuple(y.shape)}: take one column")
    _finite(y, f"{where}y")
    if y.is_floating_point() and classes is None:
        return y, 0
    return _labels(y, classes, f"{where}y")


def _labels(y: Tensor, classes: int | None, what: str) -> tuple[Tensor, int]:
    label = y.long()
    bound = int(label.max()) + 1 if classes is None else integer("classes", classes, 1)
    _require(label == y, y, f"{what} must be whole numbers, the class of each row")
    _require(label >= 0, y, f"{what} must be >= 0: number the classes from 0")
    _require(label <= min(bound, 2**63) - 1, y, f"{what} must be < classes={bound}")
    return label, bound


def _worth_storing(classes: int, rows: int) -> None:
    """A number of classes that rows could never fill is a mistake, and would take the memory of the
    machine."""
    most = max(1000, 100 * rows)
    if classes > most:
        raise InputError(
            f"got classes={classes} (the largest label + 1, unless given), need at most {most} for "
            f"{rows} rows: "
            "number the classes 0, 1, 2 ..., or pass y as float for real targets"
        )


def _finite(values: Tensor, what: str) -> None:
    _whole(values.isfinite(), f"{what} has NaN or Inf", "remove the row or fill the gap")


def _whole(good: Tensor, problem: str, remedy: str) -> None:
    """An error that names the first row with a value that is not good, of a table also the column;
    not the value."""
    rows = good.flatten(1).all(1) if good.ndim > 1 else good
    if not rows.all():
        row = int(rows.int().argmin())
        column = f", column {int(good[row].int().argmin())}" if good.ndim == 2 else ""
        raise InputError(f"{problem} in row {row}{column}: {remedy}")


def _require(good: Tensor, y: Tensor, rule: str) -> None:
    if not good.all():
        row = int(good.int().argmin())
        raise InputError(f"{rule}, got {y[row].item()} in row {row}")


def _same_length(x: Tensor, y: Tensor, where: str = "") -> None:
    if len(x) != len(y):
        raise InputError(f"{where}x has {len(x)} rows, y has {len(y)}: they must match row by row")
    if not len(x):
        raise InputError(
            f"{where or 'the federation is empty: '}x and y have no rows, need at least 1"
        )


def _indices(rows: Any, total: int, client: int) -> Tensor:
    what = f"rows of client {client}"
    own = dense(rows, what)
    if own.dtype == torch.bool and own.shape == (total,):
        own = own.nonzero().flatten()
    if not len(own):
        raise InputError(
            f"client {client} has no training rows: leave it out, or use fewer clients"
        )
    if own.ndim != 1 or own.dtype == torch.bool or own.is_floating_point():
        got = f"{own.dtype} of shape {tuple(own.shape)}"
        raise InputError(
            f"{what} must be a list of integers, or a mask of {total} booleans, got {got}"
        )
    own = own.long()
    low, high = int(own.min()), int(own.max())
    if low < 0 or high >= total:
        raise InputError(f"{what} must be in 0..{total - 1}, got {low}..{high}")
    return own


def _held_once(held: Sequence[Tensor], total: int) -> None:
    if not held:
        raise InputError("the federation is empty: got 0 clients, need at least 1")
    times = torch.bincount(torch.cat(list(held)), minlength=total)
    if times.max() > 1:
        row = int(times.argmax())
        holders = [i for i, own in enumerate(held) for _ in range(int((own == row).sum()))]
        raise InputError(
            f"row {row} is listed {len(holders)} times, by clients {holders[:4]}, need once at "
            f"most: "
            "drop the repeats, or copy the row in x and y"
        )


def _group(client_of_row: Any, total: int) -> tuple[tuple[str, ...], list[Tensor]]:
    """Client names in sorted order, and the rows of each in the order of the data."""
    ids = _array(client_of_row, "client_of_row")
    if ids.shape != (total,):
        raise InputError(
            f"client_of_row has shape {ids.shape}, need one entry for each of {total} rows"
        )
    if ids.dtype.kind == "O" and all(isinstance(v, str) for v in ids):
        ids = ids.astype(str)
    if ids.dtype.kind not in "iuU":
        raise InputError(f"client_of_row must hold integers or names, got dtype {ids.dtype}")
    names, owner, sizes = np.unique(ids, return_inverse=True, return_counts=True)
    rows = torch.from_numpy(owner.argsort(kind="stable")).split_with_sizes(sizes.tolist())
    return tuple(map(str, names)), list(rows)


def _in_order(group: Any) -> tuple[tuple[str, ...], list[Tensor]]:
    """Client names in the order of their first rows, and a mask of each one's rows."""
    names = dict.fromkeys(group.tolist())
    return tuple(names), [torch.from_numpy(group == name) for name in names]


def _pair(pair: Any, client: int, classes: int | None, gaps: bool) -> tuple[Tensor, Tensor]:
    where = f"client {client}: "
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        got = f"{len(pair)} items" if isinstance(pair, tuple | list) else type(pair).__name__
        raise InputError(f"{where}need a pair (x, y), got {got}")
    x, y = dense(pair[0], f"{where}x"), dense(pair[1], f"{where}y")
    _same_length(x, y, where)
    return _samples(x, where, gaps=gaps), _targets(y, classes, where)[0]


def _alike(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Clients must agree in sample shape and in whether y is a label."""
    if not pairs:
        raise InputError("the federation is empty: got 0 clients, need at least 1")
    (x, y), *others = pairs
    for i, (own_x, own_y) in enumerate(others, start=1):
        if own_x.shape[1:] != x.shape[1:]:
            shapes = f"{tuple(own_x.shape[1:])}, client 0 of shape {tuple(x.shape[1:])}"
            raise InputError(f"client {i} has samples of shape {shapes}: all must be alike")
        if own_y.is_floating_point() != y.is_floating_point():
            kinds = f"{own_y.dtype} y, client 0 {y.dtype}"
            raise InputError(
                f"client {i} has {kinds}: use integer labels, or float targets, everywhere"
            )
