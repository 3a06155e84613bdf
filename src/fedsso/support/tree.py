"""Records of hyper-parameters and trees of tensors: the two shapes all data takes here.

A *record* is a frozen dataclass made by ``@hyper``. Its fields annotated ``Scalar`` or ``Step`` may differ between
the trials of a sweep; all others (a name, a window length) are static: trials that differ there are run apart.
A *tree* is a tensor, a (named) tuple of trees, or ``()``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, dataclass_transform, get_args

import torch
from torch import Tensor

from ..errors import InputError, unknown

Scalar = float | Tensor
"""A hyper-parameter that may be swept: one number, or one per trial as a tensor [trials, 1]."""

Tree = Any
"""A tensor, a tuple or named tuple of trees, or ()."""

R = TypeVar("R")
SWEPT = ("Scalar", "Step", "Step | Auto")
CACHED = 1 << 18  # float64 numbers that are widened at a time


def param(*, default: Any, doc: str) -> Any:
    """A record's field with a default and one line that names the paper's symbol."""
    return field(default=default, metadata={"doc": doc})


@dataclass_transform(frozen_default=True, field_specifiers=(field, param))
def hyper(cls: type[R]) -> type[R]:
    """Make a class a frozen record whose ``Scalar`` and ``Step`` fields can be stacked over trials."""
    return dataclass(frozen=True)(cls)


def swept(record: Any) -> list[str]:
    """Names of the fields that may differ between stacked trials: by the text of their type, or the type itself."""
    return [f.name for f in fields(record) if f.type in SWEPT or Tensor in get_args(f.type)]


def fields_of(cls: Any) -> tuple[Field[Any], ...]:
    """The fields of a record or of its class."""
    return fields(cls)


def build(cls: type[R], values: dict[str, Any]) -> R:
    """A record from keyword values, with a clear error for a name it does not have."""
    names = [f.name for f in fields_of(cls)]
    for name in values:
        if name not in names:
            raise unknown(f"field of {cls.__name__}", name, names)
    return cls(**values)


def to_dict(record: Any) -> dict[str, Any]:
    """A record's fields as plain values; nested records (schedules) become nested dictionaries."""
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    return {k: to_dict(v) if is_dataclass(v) else v for k, v in values.items()}


def changed(record: Any) -> dict[str, Any]:
    """The fields that differ from their defaults: the short way to name a record."""
    defaults = {f.name: f.default for f in fields(record) if f.default is not MISSING}
    return {k: v for k, v in to_dict(record).items() if k not in defaults or defaults[k] != v}


def signature(record: Any) -> tuple[Any, ...]:
    """What must be equal for records to be stacked: their type, static fields and the types of swept ones."""
    free = set(swept(record))
    parts: list[Any] = [type(record)]
    for f in fields(record):
        value = getattr(record, f.name)
        if f.name not in free:
            parts.append(value)
        elif is_dataclass(value):
            parts.append(signature(value))
        elif isinstance(value, str):
            parts.append(value)
    return tuple(parts)


def stack(records: Sequence[R], dtype: torch.dtype, device: torch.device) -> R:
    """One record whose swept fields are tensors [trials, 1]: a grid of records *is* the sweep."""
    if len({signature(r) for r in records}) != 1:
        raise InputError("only records of one type with equal static fields can be stacked")
    first: Any = records[0]
    values = {f.name: getattr(first, f.name) for f in fields(first)}
    for name in swept(first):
        column = [getattr(r, name) for r in records]
        if is_dataclass(column[0]):
            values[name] = stack(column, dtype, device)
        elif not isinstance(column[0], str):
            values[name] = torch.tensor(column, dtype=dtype, device=device).reshape(-1, 1)
    stacked: R = object.__new__(type(first))
    for name, value in values.items():
        object.__setattr__(stacked, name, value)  # validated one by one already
    return stacked


def leaves(tree: Tree) -> Iterator[Tensor]:
    """The tensors of a tree, in order."""
    if isinstance(tree, Tensor):
        yield tree
    else:
        for branch in tree:
            yield from leaves(branch)


def tree_map(fn: Callable[..., Tensor], tree: Tree, *others: Tree) -> Tree:
    """Apply fn leaf by leaf to trees of the same shape."""
    if isinstance(tree, Tensor):
        return fn(tree, *others)
    branches = [tree_map(fn, *parts) for parts in zip(tree, *others, strict=True)]
    return type(tree)(*branches) if hasattr(tree, "_fields") else tuple(branches)


def named_leaves(tree: Tree, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Leaves with dotted names, for checkpoints."""
    if isinstance(tree, Tensor):
        yield prefix, tree
    else:
        names = getattr(tree, "_fields", range(len(tree)))
        for name, branch in zip(names, tree, strict=True):
            yield from named_leaves(branch, f"{prefix}.{name}")


def nbytes(tree: Tree, copies: int) -> int:
    """Bytes of one copy of a message whose leaves carry `copies` of it."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree)) // copies


def gram(*vectors: Tensor) -> Tensor:
    """All inner products of n vectors [..., d] in float64, [..., n, n]; they are widened block by block, in cache."""
    first, n = vectors[0], len(vectors)
    lead, d = first.shape[:-1], first.shape[-1]
    width = min(d, max(1024, CACHED // max(1, n * first[..., 0].numel()))) if first.is_cpu else d
    wide = first.new_empty(*lead, n, width, dtype=torch.float64)
    total = wide.new_zeros(*lead, n, n)
    for start in range(0, d, width):
        block = wide[..., : min(width, d - start)]
        for i, v in enumerate(vectors):
            block[..., i, :] = v[..., start : start + width]
        total += block @ block.mT
    return total


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner product over the last axis in float64, [..., 1]."""
    if max(a.numel(), b.numel()) <= CACHED:  # no blocks: a call of gram takes eight times as long
        return (a.double() * b.double()).sum(-1, keepdim=True)
    return gram(a, b)[..., 0, 1:]


def norm(a: Tensor) -> Tensor:
    """Euclidean length over the last axis in float64, [..., 1]."""
    return gram(a)[..., 0, :].sqrt()


def solve(A: Tensor, b: Tensor) -> Tensor:
    """A^-1 b for A [..., d, d] and b [..., d]; NaN where A is singular, which costs no neighbour its answer.

    Large matrices, and all on a CPU, one after the other: a GPU's batched routines are made for small ones, and with
    several of more than some hundred rows, on more than one thread, torch 2.13 fails in its LU factorisation on a CPU.
    """
    if A.dim() > 2 and (A.is_cpu or A.shape[-1] > 512):
        parts = [solve(one, v) for one, v in zip(A.flatten(0, -3), b.flatten(0, -2), strict=True)]
        return torch.stack(parts).view(b.shape)
    z, failed = torch.linalg.solve_ex(A, b.unsqueeze(-1))
    return torch.where(failed.unsqueeze(-1) == 0, z.squeeze(-1), torch.nan)
