"""What clients send: compressed, if wished, with error feedback.

What a compressor loses in one round is added to what the client sends in its next: e + v is sent
as C(e + v), and e' = e + v - C(e + v) stays with the client. So nothing is lost for good: what is
left out arrives later.

Only vectors of the model's size are compressed; scalars, losses of a line search and what an
algorithm has compressed itself go as they are. The compressors are in `maths/compress.py`.
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
    """Encodes the uploads of one algorithm; without a compressor everything goes as it is.

    `width` is the length d of the vectors that are compressed.
    """

    def __init__(self, compressor: Compressor | None, width: int) -> None:
        self.compressor = compressor
        self.width = width

    def __call__(
        self, phase: Phase, number: int, clients: Sequence[int], upload: Tree, errors: Errors
    ) -> tuple[Tree, Tree]:
        """The uploads of some clients as sent, and as the server reads them.

        Args:
            phase: The exchange, which knows how its uploads are decoded and whether they must be
                exact.
            number: Its place in the round, a part of the names in `errors`.
            clients: Who sends, in the order of the first axis of the uploads.
            upload: Leaves [clients, trials, ...].
            errors: What each client still owes. It is brought up to date in place, so that
                callers pass a copy of the state's.

        Returns:
            The tree whose bytes travel, and the decoded tree that is averaged.
        """
        code = self.compressor
        if code is None or phase.exact:
            return upload, phase.decode(upload)
        # what decoding changes, the algorithm has compressed already
        plain = {id(leaf) for leaf in leaves(phase.decode(upload))}
        sent = []
        read = []
        for place, leaf in enumerate(leaves(upload)):
            is_vector = leaf.dim() == 3 and leaf.shape[-1] == self.width
            if not (is_vector and id(leaf) in plain):
                sent.append(leaf)
                read.append(leaf)
                continue
            names = [f"{number}.{place}.{i}" for i in clients]
            nothing = torch.zeros_like(leaf[0])
            # A client that has not sent this leaf before owes nothing.
            owed = torch.stack([errors.get(name, nothing) for name in names])
            whole = leaf + owed
            encoded = code.encode(whole)
            decoded = code.decode(encoded, whole)
            sent.append(encoded)
            read.append(decoded)
            lost = whole - decoded
            for m, name in enumerate(names):
                errors[name] = part_of(lost, m)
        return tuple(sent), phase.decode(_like(upload, iter(read)))


def part_of(leaf: Tensor, m: int) -> Tensor:
    """What client m keeps of a leaf [clients, ...].

    It is a copy, since a view would keep the memory of all clients. With a single client the leaf
    is its own already.
    """
    return leaf[m].clone() if len(leaf) > 1 else leaf[0]


def client_of(name: str) -> int:
    """The client whose error goes by this name."""
    return int(name.rpartition(".")[2])


def _like(tree: Tree, parts: Iterator[Tensor]) -> Any:
    """A tree of the same shape, with these leaves in order.

    A leaf may be replaced by a tensor of any other shape.
    """
    return tree_map(lambda _: next(parts), tree)


def uplink(algorithm: Algorithm, server: Any, layout: Layout, text: str | None) -> Uplink:
    """The way up for an algorithm and a model.

    Args:
        algorithm: Where every client has a model of its own, only a part of it travels.
        server: The initial server state, whose x is that part.
        layout: The shapes of the model's parameters.
        text: The compressor, such as "topk:0.01"; None: nothing is compressed.

    Raises:
        InputError: The text names no compressor, or one that cannot shorten any parameter.
    """
    width = server.x.shape[-1] if algorithm.personal else sum(layout.sizes)
    shapes: list[torch.Size] = []
    rest = width
    for shape in layout.shapes:
        if rest > 0:
            whole = shape.numel() <= rest
            shapes.append(shape if whole else torch.Size([rest]))  # a part of a matrix is a vector
            rest -= shape.numel()
    return Uplink(None if text is None else compressor(text, shapes), width)
