"""Bytes of one round, counted on the tensors that really travel.

Nothing is estimated: every tensor of a message or upload counts with its own size and type. All
trials travel in one tensor here, so each is divided by the number of trials.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..support.trees import Tree, leaves, nbytes


class Ledger:
    """What the clients receive and send in one round. Leaves carry one copy for each trial.

    `down` and `up` are the bytes of all clients together, for one trial; `unsent` [trials] or 0 are
    those in `up` that clients left out. A new ledger is made for every round.
    """

    def __init__(self, clients: int, trials: int) -> None:
        self.clients = clients
        self.trials = trials
        self.down = 0
        self.up = 0
        self.unsent: Tensor | float = 0.0
        self._held: list[tuple[Tensor, Tensor]] = []  # a tensor sent in this round, and to whom

    def broadcast(self, message: Tree, chosen: Tensor) -> None:
        """Count a message to the chosen clients, those that will not answer among them.

        A tensor that a client has received earlier in the round is not sent to it again. It is
        known by being the same object: an equal copy counts anew.
        """
        for leaf in leaves(message):
            size = nbytes(leaf, self.trials)
            has = [who for sent, who in self._held if sent is leaf]
            self._held.append((leaf, chosen))
            if not has:
                self.down += size * len(chosen)
                continue
            new = ~torch.isin(chosen, torch.cat(has))
            self.down += size * int(new.sum())

    def letters(self, messages: Tree) -> None:
        """Count messages of which every client gets its own; they are the first axis of a leaf."""
        self.down += nbytes(messages, self.trials)

    def upload(self, sent: Tree, clients: int, unsent: Tensor | None = None) -> None:
        """Count the uploads of several clients at once; they are the first axis of every leaf.

        `sent` is what travels, before it is decoded. Of it, `unsent` [clients, trials] bytes are
        left out.
        """
        self.up += nbytes(sent, clients * self.trials) * clients
        if unsent is not None:
            self.unsent = self.unsent + unsent.double().sum(0)
