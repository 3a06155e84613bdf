"""Trees of tensors: the shape that states, messages and uploads have.

A tree is a tensor, a (named) tuple of trees, or ``()``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

Scalar = float | Tensor
"""A hyper-parameter that may be swept: one number, or one per trial as a tensor [trials, 1]."""


Tree = Any
"""A tensor, a tuple or named tuple of trees, or ()."""


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
