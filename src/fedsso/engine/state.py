"""The state of a simulation: everything that a round changes, as one immutable value.

A round makes a new state from the old one and replaces it in a single assignment. So an interrupt
never leaves a round half-done, and a checkpoint is this value and the rows of the trace.

Tensors in a state are never written into once it stands, with one exception: FedSSO's store of
curvature pairs. A round writes the new pair over the oldest one, of which the old state keeps a
copy; it is put back if the round is undone (`maths.quasi_newton.Pairs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..support.trees import Tree, tree_map

if TYPE_CHECKING:
    from .per_client import Absence, PerClient
    from .uplink import Errors

KEPT = ("server", "buffers", "ended", "diverged", "first_loss")
"""The fields of a state that are trees of tensors with the trials as their first axis."""
BY_CLIENT = ("own", "memory")
"""The fields that hold such a tree for each client."""


class State(NamedTuple):
    """What is known after round k. Trees have leaves [trials, ...].

    `own`, `memory`, `position` and `absence` are in the order of the federation's clients.
    `errors` is empty without compression.
    """

    k: int
    server: Any  # the algorithm's server state
    own: PerClient[Tree]  # each client's own state; shared by all until a client's first round
    memory: PerClient[Tree]  # what the server remembers of each client; shared likewise
    errors: Errors  # what compression has held back so far
    buffers: Tensor  # BatchNorm statistics and the like, [trials, b]
    position: PerClient[int]  # how many mini-batches each client has drawn
    absence: Absence  # how often the others have answered since each client did, on average
    ended: Tensor  # the round in which a trial diverged or stopped, [trials]; -1: it is running
    diverged: Tensor  # the round in which it diverged, [trials]; 0: it has not
    first_loss: Tensor  # the loss of the first round that somebody answered, [trials]


def choose(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Of two leaves [trials, ...] the new one where the mask [trials] is true, else the old one.

    A leaf that the round did not replace (the same object) is returned as it is, without a copy.
    """
    if new is old:
        return new
    wide = mask.view(-1, *[1] * (new.dim() - 1))
    return torch.where(wide, new, old)


def gathered(own: Sequence[Tree]) -> Tree:
    """The states of some clients as one tree, with leaves [clients, trials, ...].

    With a single client the leaves are views of its own, which client functions must not write
    into.
    """
    if len(own) == 1:
        return tree_map(lambda leaf: leaf.unsqueeze(0), own[0])  # no copy: it may be a large matrix
    return tree_map(lambda *each: torch.stack(each), *own)
