"""What clients send: compressed, if wished, with error feedback.

What a compressor loses in one round is added to what the client sends in its next: e + v is sent as
C(e + v), and e' = e + v - C(e + v) stays with the client. Only vectors of the model's size are
compressed; scalars, losses of a line search and what an algorithm has compressed itself go as they
are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..maths.compress import Compressor, compressor
from ..support.trees import Tree, leaves, tree_map

if TYPE_CHECKING:
    from ..algorithm import Algorithm, Phase
    from ..objective import Layout

Errors = dict[str, Tensor]
"""e [trials, d] by exchange, place in the upload and client."""


class Uplink:
    """Encodes the uploads of one algorithm; without a compressor everything goes as it is."""

    def __init__(self, compressor: Compressor | None, width: int) -> None:
        self.compressor, self.width = compressor, width

    def __call__(
        self, phase: Phase, number: int, clients: Sequence[int], upload: Tree, errors: Errors
    ) -> tuple[Tree, Tree]:
        """The uploads of some clients as sent, and as the server reads them; `errors` is brought up
        to date."""
        code = self.compressor
        if code is None or phase.exact:
            return upload, phase.decode(upload)
        plain = {
            id(leaf) for leaf in leaves(phase.decode(upload))
        }  # what decoding changes is compressed already
        sent, read = [], []
        for place, leaf in enumerate(leaves(upload)):
            if id(leaf) in plain and leaf.dim() == 3 and leaf.shape[-1] == self.width:
                names = [f"{number}.{place}.{i}" for i in clients]
                whole = leaf + torch.stack(
                    [errors.get(n, torch.zeros_like(leaf[0])) for n in names]
                )
                sent.append(code.encode(whole))
                read.append(code.decode(sent[-1], whole))
                lost = whole - read[-1]
                errors.update({name: part_of(lost, m) for m, name in enumerate(names)})
            else:
                sent.append(leaf)
                read.append(leaf)
        return tuple(sent), phase.decode(_like(upload, iter(read)))


def part_of(leaf: Tensor, m: int) -> Tensor:
    """What client m keeps of a leaf [clients, ...]: a copy, since a view would keep the memory of
    all."""
    return leaf[m].clone() if len(leaf) > 1 else leaf[0]


def _like(tree: Tree, parts: Iterator[Tensor]) -> Any:
    return tree_map(lambda _: next(parts), tree)


def uplink(algorithm: Algorithm, server: Any, layout: Layout, text: str | None) -> Uplink:
    """The way up for an algorithm and a model: vectors as long as the part of the model that
    travels are compressed."""
    width = server.x.shape[-1] if algorithm.personal else sum(layout.sizes)
    shapes, rest = list[torch.Size](), width
    for shape in layout.shapes:
        if rest > 0:
            shapes.append(
                shape if shape.numel() <= rest else torch.Size([rest])
            )  # a part of a matrix is a vector
            rest -= shape.numel()
    return Uplink(None if text is None else compressor(text, shapes), width)
