"""Trees of tensors: the shape that states, messages and uploads have.

A tree is a tensor, or a tuple of trees, or a named tuple of trees. The empty tuple `()` is a tree
without tensors. The tensors are called leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

Scalar = float | Tensor
"""A hyper-parameter that may be swept: one number, or one for each trial, [trials, 1]."""

Tree = Any
"""A tensor, a tuple or named tuple of trees, or ()."""


def leaves(tree: Tree) -> Iterator[Tensor]:
    """The tensors of a tree, in order."""
    if isinstance(tree, Tensor):
        yield tree
        return
    for branch in tree:
        yield from leaves(branch)


def tree_map(fn: Callable[..., Tensor], tree: Tree, *others: Tree) -> Tree:
    """Apply a function leaf by leaf to one tree, or to several trees of the same shape.

    The result has the shape of the first tree, and its named tuples.

    >>> import torch
    >>> tree_map(torch.add, (torch.tensor(1), ()), (torch.tensor(2), ()))
    (tensor(3), ())
    """
    if isinstance(tree, Tensor):
        return fn(tree, *others)
    branches = []
    for parts in zip(tree, *others, strict=True):
        branch = tree_map(fn, *parts)
        branches.append(branch)
    is_named = hasattr(tree, "_fields")
    return type(tree)(*branches) if is_named else tuple(branches)


def named_leaves(tree: Tree, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a tree with dotted names, as checkpoints store them.

    >>> import torch
    >>> [name for name, _ in named_leaves((torch.zeros(2), (torch.zeros(3),)), "state")]
    ['state.0', 'state.1.0']
    """
    if isinstance(tree, Tensor):
        yield prefix, tree
        return
    names = getattr(tree, "_fields", range(len(tree)))
    for name, branch in zip(names, tree, strict=True):
        yield from named_leaves(branch, f"{prefix}.{name}")


def nbytes(tree: Tree, copies: int) -> int:
    """The bytes of one message, where the tree carries `copies` messages of the same size."""
    total = 0
    for leaf in leaves(tree):
        total += leaf.numel() * leaf.element_size()
    return total // copies
