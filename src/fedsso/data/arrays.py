"""From a user's arrays to checked tensors.

Users pass lists, numpy arrays, data frames or tensors, of many types. The functions here turn them
into tensors that training can use, and raise an InputError that names the first wrong row where
this is impossible. In error messages, `what` is the name of the array, and `where` is a prefix such
as "client 3: ".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, integer
from ..support.sparse import canonical, entries, is_csr, rows_of_entries
from .mapped.rows import PIECE, MappedRows, is_mapped

Array = np.ndarray[Any, Any]
Pair = tuple[Tensor, Tensor]  # the samples and targets of one client

# Number types of torch and of numpy with which torch cannot compute.
UNSIGNED = (
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
UNSUPPORTED = (
    np.uint16,
    np.uint32,
    np.uint64,
    np.longdouble,
)
# Number types of torch that can be computed with, or be converted to one of these.
PLAIN = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *UNSIGNED,
)


# ---- from anything to a tensor ----


def dense(values: Any, what: str) -> Tensor:
    """Turn anything array-like into a tensor on the CPU. Memory is shared where torch can.

    Floats and uint8 keep their type. Unsigned integers that torch cannot compute with become int64.

    Args:
        values: A list, a numpy array, a data frame or a tensor, of at least one dimension.
        what: The name of the array in errors.

    Raises:
        InputError: It holds text or complex numbers, is ragged, sparse, or a single number.

    >>> dense([[1.0, 2.0]], "x").shape
    torch.Size([1, 2])
    >>> dense(5, "x")
    Traceback (most recent call last):
    fedsso.errors.InputError: x must be an array or a list, got 5
    """
    tensor = _from_tensor(values, what) if isinstance(values, Tensor) else None
    if tensor is None:
        array = as_array(values, what)
        usable = _in_a_type_of_torch(array, what)
        tensor = torch.from_numpy(usable)
    if not tensor.ndim:
        raise InputError(f"{what} must be an array or a list, got {values!r}")
    if tensor.is_complex():
        raise InputError(f"{what} must be real, got dtype {tensor.dtype}")
    return tensor


def _from_tensor(values: Tensor, what: str) -> Tensor | None:
    """The tensor without its gradient, on the CPU; None if its type needs a conversion first."""
    _check_plain(values, what)
    if values.layout != torch.strided:
        raise InputError(f"{what} must be dense, got layout {values.layout}: use .to_dense()")
    if values.dtype in UNSIGNED:
        return None
    return values.detach().cpu()


def as_array(values: Any, what: str) -> Array:
    """Turn anything array-like into a numpy array of any type.

    A tensor loses its gradient and comes to the CPU first.
    """
    _check_plain(values, what)
    if isinstance(values, Tensor):
        values = values.detach().cpu()
    try:
        return np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(
            f"{what} is ragged or not an array: every row needs the same shape ({error})"
        ) from None


def _check_plain(values: Any, what: str) -> None:
    """Raise InputError for what has no numbers, or hides some of them."""
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        count = int(np.ma.getmaskarray(values).sum())
        raise InputError(
            f"{what} is a masked array with {count} masked values, which would count as they are: "
            "remove their rows, or pass .filled(numpy.nan) with standardise=True"
        )
    if not isinstance(values, Tensor):
        return
    has_numbers = values.dtype in PLAIN or values.is_complex()
    if values.is_meta or values.is_nested or not has_numbers:
        kind = "nested" if values.is_nested else "meta" if values.is_meta else values.dtype
        raise InputError(
            f"{what} must be a plain tensor of numbers, got a tensor that is {kind}: "
            "make one of float32 or int64 of it"
        )


def _in_a_type_of_torch(array: Array, what: str) -> Array:
    """The same numbers in a type, byte order and memory layout that torch computes with.

    The array is copied only if that is necessary: torch cannot share memory that is read-only, in
    the other byte order, or not in one piece.
    """
    dtype = array.dtype
    if dtype.kind not in "biuf":
        raise InputError(
            f"{what} must hold numbers, got dtype {dtype}: encode names, make sparse data dense"
        )
    if dtype == np.uint64:
        largest = array.max(initial=0)
        if largest >= 2**63:
            raise InputError(f"{what} must be < 2**63, got {largest}: pass smaller numbers")
    native = dtype.newbyteorder("=")
    read_only = not array.flags.writeable  # torch cannot share such memory
    array = array.astype(native, copy=read_only)
    if array.dtype in UNSUPPORTED:
        wide = np.int64 if array.dtype.kind == "u" else np.float64
        array = array.astype(wide)
    return np.require(array, requirements="C")


def listed(values: Any, rule: str) -> list[Any]:
    """Turn an iterable into a list.

    `rule` says what it should have been, for the error: "rows must list ...".
    """
    try:
        return list(values)
    except TypeError:
        raise InputError(f"{rule}, got {values!r}") from None


# ---- sparse rows ----


def rows_from(values: Any, what: str) -> Tensor:
    """The samples as a tensor on the CPU: sparse ones stay sparse, mapped ones stay in their files.

    All else is `dense`.

    >>> rows_from(torch.eye(2).to_sparse(), "x").layout
    torch.sparse_csr
    """
    if isinstance(values, MappedRows):
        return values
    _check_plain(values, what)
    if is_mapped(values):
        if values.dtype.kind not in "biuf":
            raise InputError(f"{what} must hold numbers, got dtype {values.dtype}: encode names")
        return MappedRows([values])
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
        raise InputError(f"{what} has NaN or Inf in {place}: remove the row or fill in the value")
    return canonical(rows, columns, values, (shape[0], shape[1]))


# ---- samples and targets ----


def check_same_length(x: Tensor, y: Tensor, where: str = "") -> None:
    """Raise InputError unless x and y have the same number of rows, and at least one."""
    rows = len(x)
    targets = len(y)
    if rows != targets:
        raise InputError(f"{where}x has {rows} rows, y has {targets}: they must match row by row")
    if not rows:
        prefix = where or "the federation is empty: "
        raise InputError(f"{prefix}x and y have no rows, need at least 1")


def checked_samples(
    x: Tensor,
    where: str = "",
    *,
    gaps: bool = False,
) -> Tensor:
    """Return the samples in a type that is kept: uint8 or floating. Other integers become float32.

    Args:
        x: The samples, [rows, ...].
        where: The beginning of an error message.
        gaps: Whether x is a table that will be standardised. Then NaN is allowed, and marks a gap.
            Otherwise every number must be finite.

    Raises:
        InputError: x is no table or stack of images, or a number is not finite. The message names
            the row.
    """
    if is_csr(x):  # which was checked when it was made
        return x
    sample = x.shape[1:]
    if x.ndim < 2 or sample.numel() == 0:
        shape = tuple(x.shape)
        raise InputError(f"{where}x must be [rows, features] or [rows, C, H, W], got shape {shape}")
    if x.dtype != torch.uint8 and not x.is_floating_point():
        x = x.float()
    if gaps:
        _check_table(x, where)
    if isinstance(x, MappedRows):  # which are checked when they are read
        return x
    if gaps:
        remedy = "remove the row, or mark it as missing with NaN"
        check_every_value(x, lambda some: ~some.isinf(), f"{where}x has Inf", remedy)
    elif x.is_floating_point():
        remedy = (
            "remove the row or fill in the value; in a table standardise=True fills missing values"
        )
        check_every_value(x, torch.isfinite, f"{where}x has NaN or Inf", remedy)
    return x


def _check_table(x: Tensor, where: str) -> None:
    """Raise InputError unless x is a table of floats, which alone can be standardised."""
    if x.ndim == 2 and x.is_floating_point():
        return
    got = f"{x.dtype} of shape {tuple(x.shape)}"
    raise InputError(
        f"{where}standardise needs a table x [rows, features] of floats, got {got}: leave it out"
    )


def checked_targets(
    y: Tensor,
    classes: int | None,
    where: str = "",
) -> tuple[Tensor, int]:
    """Return (int64 labels, number of classes), or (real targets, 0).

    Floats are real targets unless `classes` is given. Anything else is a label, a whole number
    from 0 to classes - 1. Without `classes`, their number is the largest label + 1.

    >>> checked_targets(torch.tensor([0, 2, 1]), None)
    (tensor([0, 2, 1]), 3)
    >>> checked_targets(torch.tensor([0.5, 2.0]), None)
    (tensor([0.5000, 2.0000]), 0)
    """
    if y.ndim != 1:
        shape = tuple(y.shape)
        raise InputError(f"{where}y must be [rows], got shape {shape}: take one column")
    check_finite(y, f"{where}y")
    if y.is_floating_point() and classes is None:
        return y, 0
    return _labels(y, classes, f"{where}y")


def _labels(
    y: Tensor,
    classes: int | None,
    what: str,
) -> tuple[Tensor, int]:
    """The labels as int64 and the number of classes. InputError if one is out of range."""
    label = y.long()
    if classes is None:
        bound = int(label.max()) + 1
    else:
        bound = integer("classes", classes, 1)
    # The largest label can be 2^63 - 1. Then the bound itself is too large for int64.
    largest = min(bound, 2**63) - 1
    rules = {
        f"{what} must be whole numbers, the class of each row": label == y,
        f"{what} must be >= 0: number the classes from 0": label >= 0,
        f"{what} must be < classes={bound}": label <= largest,
    }
    for rule, good in rules.items():
        if not good.all():
            row = _first_false(good)
            wrong = y[row].item()
            raise InputError(f"{rule}, got {wrong} in row {row}")
    return label, bound


def _first_false(good: Tensor) -> int:
    """The place of the first False among booleans."""
    return int(good.int().argmin())


def check_number_of_classes(classes: int, rows: int) -> None:
    """Raise InputError if there are far more classes than rows.

    Such a number is a mistake, for example row numbers passed as labels. A model with so many
    outputs would take all the memory of the machine.
    """
    most = max(1000, 100 * rows)
    if classes > most:
        raise InputError(
            f"got classes={classes} (the largest label + 1, unless given), need at most {most} for "
            f"{rows} rows: number the classes 0, 1, 2 ..., or pass y as float for real targets"
        )


def check_finite(values: Tensor, what: str) -> None:
    """Raise InputError that names the first row with NaN or Inf."""
    if values.is_floating_point():
        remedy = "remove the row or fill in the value"
        check_every_value(values, torch.isfinite, f"{what} has NaN or Inf", remedy)


def check_every_value(
    values: Tensor,
    good: Callable[[Tensor], Tensor],
    problem: str,
    remedy: str,
) -> None:
    """Raise InputError that names the first row, and in a table the column, which is not good.

    Args:
        values: The numbers, [rows, ...].
        good: Tells for each number whether it is good, as every finite number must be.
        problem: What is wrong, such as "x has NaN or Inf".
        remedy: What to do about it.

    The message does not quote the value itself, so that it tells nothing about a patient. Rows are
    looked at in pieces, so that no copy of them is made. A sum is finite only if all its numbers
    are: it is several times faster than a look at each.
    """
    before = 0
    for piece in pieces(values):
        if not piece.sum().isfinite():
            _check_piece(good(piece), before, problem, remedy)
        before += len(piece)


def _check_piece(good: Tensor, before: int, problem: str, remedy: str) -> None:
    """The same for one piece, which comes after so many other rows."""
    rows = good
    if good.ndim > 1:
        rows = good.flatten(1).all(1)
    if rows.all():
        return
    row = _first_false(rows)
    place = f"row {before + row}"
    if good.ndim == 2:
        column = _first_false(good[row])
        place += f", column {column}"
    raise InputError(f"{problem} in {place}: {remedy}")


def pieces(values: Tensor) -> Iterator[Tensor]:
    """The rows of a tensor in pieces of some megabytes, in their order.

    Rows in files are read piece by piece, so that they need not fit into memory.
    """
    row_bytes = values[:1].numel() * values.element_size()
    step = max(1, PIECE // max(1, row_bytes))
    for begin in range(0, len(values), step):
        yield values[begin : begin + step]


# ---- one pair (x, y) for each client ----


def by_names(pairs: Sequence[Any]) -> list[Any]:
    """The pairs (x, y), in which all data frames have their columns in the order of the first.

    InputError for a data frame that has other columns.
    """
    names: list[Any] = []
    found = []
    for client, pair in enumerate(pairs):
        x = pair[0] if isinstance(pair, tuple | list) and len(pair) == 2 else None
        own = list(getattr(x, "columns", names))
        names = names or own
        if own != names:
            odd = [name for name in (*own, *names) if own.count(name) != names.count(name)]
            if odd or len(set(own)) < len(own):
                raise InputError(
                    f"client {client}: x has not the same columns as the first data frame, see "
                    f"{(odd or own)[0]!r}: give all clients the same names, each once"
                )
            pair = (pair[0][names], pair[1])
        found.append(pair)
    return found


def checked_pair(
    pair: Any,
    client: int,
    classes: int | None,
    gaps: bool,
    read: Callable[[Any, str], Tensor] = dense,
) -> Pair:
    """Return one client's (samples, targets), checked like those of a whole federation.

    Args:
        pair: What the user gave, which should be (x, y).
        client: The number of the client, which errors name.
        classes: The number of classes, or None.
        gaps: Whether NaN is allowed in the samples, as in `checked_samples`.
        read: Makes a tensor of the samples.
    """
    where = f"client {client}: "
    is_sequence = isinstance(pair, tuple | list)
    if not is_sequence or len(pair) != 2:
        got = f"{len(pair)} items" if is_sequence else type(pair).__name__
        raise InputError(f"{where}need a pair (x, y), got {got}")
    x = read(pair[0], f"{where}x")
    y = dense(pair[1], f"{where}y")
    check_same_length(x, y, where)
    samples = checked_samples(x, where, gaps=gaps)
    targets, _ = checked_targets(y, classes, where)
    return samples, targets


def check_alike(pairs: Sequence[Pair]) -> None:
    """Raise InputError unless all clients have samples of one shape and targets of one kind."""
    if not pairs:
        raise InputError("the federation is empty: got 0 clients, need at least 1")
    first_x, first_y = pairs[0]
    shape = tuple(first_x.shape[1:])
    for client, (x, y) in enumerate(pairs):
        own_shape = tuple(x.shape[1:])
        if own_shape != shape:
            shapes = f"{own_shape}, client 0 of shape {shape}"
            raise InputError(f"client {client} has samples of shape {shapes}: all must be alike")
        is_real = y.is_floating_point()
        if is_real != first_y.is_floating_point():
            kinds = f"{y.dtype} y, client 0 {first_y.dtype}"
            raise InputError(
                f"client {client} has {kinds}: use integer labels, or float targets, everywhere"
            )


def checked_names(given: Iterable[Any], clients: int) -> tuple[str, ...]:
    """Return the clients' names as text: none at all, or one for each client."""
    rule = f"client_names must name {clients} clients"
    names = listed(given, rule)
    if names and len(names) != clients:
        raise InputError(f"{rule}, got {len(names)} names")
    return tuple(map(str, names))


def client_weights(weights: Any, clients: int) -> Tensor | None:
    """Return a user's own client weights p_i as float64 [clients], or None where there are none.

    They must not be negative and must sum to 1.

    >>> client_weights([0.25, 0.75], 2)
    tensor([0.2500, 0.7500], dtype=torch.float64)
    """
    if weights is None:
        return None
    p = dense(weights, "weights").double()
    shape = tuple(p.shape)
    if shape != (clients,):
        raise InputError(
            f"weights has shape {shape}, need one number for each of {clients} clients"
        )
    total = float(p.sum())
    sums_to_one = abs(total - 1) < 1e-9
    if not (p >= 0).all() or not sums_to_one:
        raise InputError(
            f"weights must be >= 0 and sum to 1, got {p.tolist()}: divide them by their sum"
        )
    return p
