"""Who is remembered, in a federation that somebody else runs: FedSSO with memory="clients".

In the simulator the engine knows all clients and their weights p_i. Here they are only known by
what they send. Clients come and go, and each tells its weight n_i (its number of rows) with its
answer. So the weights are made anew in every round, for the clients that are connected then:

    p_i = n_i / N,    N = (sum of n_j over all j that are known or answer now) * c / h

where c clients are connected and h of them are known or answer now: one that has never answered
counts with the mean of the others. The share of those who answer is m = sum_S n_i / N, and exactly
1 if everybody does. What is remembered and how it is used is in `algorithms/memory.py`, whose
symbols these are.

A client that is not connected does not count, but stays remembered: it may come back. If it
counted, the last gradients of clients that have left for good would be part of the mean for many
rounds, and beta could not tell, because they shift the deviations of all clients alike. A client
that has not answered while the others did so twenty times each, on average, is forgotten.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import NamedTuple, Self

import torch
from torch import Tensor

from .algorithm.contract import FORGOTTEN
from .algorithms import memory
from .algorithms.memory import Heard, Kept
from .errors import InputError
from .server import Answers
from .support.trees import Scalar, tree_map

log = logging.getLogger("fedsso")

# Names of tensors in a checkpoint.
PREFIX = "remembered."
IDS = f"{PREFIX}ids"
ROUNDS = f"{PREFIX}rounds"
NUMBERS = f"{PREFIX}numbers"
SUM = f"{PREFIX}u."
MODEL = f"{PREFIX}x."


class Answer(NamedTuple):
    """What one client sent in a round."""

    client: int
    """Its id, which is the same whenever it answers."""
    weight: float
    """n_i, a positive number."""
    update: Tensor
    """v_i - x, [d]."""


class Client(NamedTuple):
    """What is remembered of one client."""

    weight: float
    """n_i of its last answer."""
    unheard: float
    """How often the others have answered since then, on average."""
    k: int
    """The round of its last answer."""
    u: Tensor
    """o_i, [d]: the sum of its local gradients in that round."""


@dataclass(frozen=True)
class Remembered:
    """The clients that are known.

    It is never modified: `hear` returns a new one, which the caller takes over if the round has
    succeeded.

    >>> x = torch.zeros(2)
    >>> answer = Answer(7, 30.0, torch.tensor([0.1, 0.2]))
    >>> answers, remembered = Remembered().hear(x, 1.0, 1, [answer], answer.update, {7, 8})
    >>> answers.mass, list(remembered.clients)
    (0.5, [7])
    """

    clients: Mapping[int, Client] = field(default_factory=dict)
    """What is remembered of each, by its id."""
    models: Mapping[int, Tensor] = field(default_factory=dict)
    """The models x [d] that they answered to, by round. Clients of one round share it."""

    def hear(
        self,
        x: Tensor,
        alpha: Scalar,
        k: int,
        answers: Sequence[Answer],
        update: Tensor,
        connected: Collection[int],
    ) -> tuple[Answers, Self]:
        """What the server makes its step from, and what is remembered from now on.

        Args:
            x: The model of the round, [d].
            alpha: The clients' step in this round.
            k: The round; it must be later than all before.
            answers: What the clients sent, at least one of them.
            update: The weighted mean of their updates, [d]. It is taken as it is, so that a step
                without a memory is the same to the bit where everybody answers.
            connected: The ids of the clients that could have answered.

        Returns:
            What `Server.advance` takes, and the new memory.
        """
        if not answers:
            raise InputError("nobody has answered, so there is nothing to hear")
        before = self._without_the_lost(k)
        now = {answer.client: answer.weight for answer in answers}
        n = before._weights(now, connected)
        mass = 1.0 if n.keys() == now.keys() else fsum(now.values()) / fsum(n.values())
        mean = before._mean(x, n)
        heard, sums = before._heard(mean, x, alpha, answers)
        heard = heard._replace(delta=update[None])
        clients = {}
        for client, entry in before.clients.items():
            clients[client] = entry._replace(unheard=entry.unheard + mass)
        for client, u in sums.items():
            clients[client] = Client(now[client], 0.0, k, u)
        models = {**before.models, k: x.clone()}
        after = type(self)(clients, _used(models, clients))
        return Answers(heard, len(answers), mass, mean.total, float(mean.mass)), after

    def _heard(
        self,
        mean: memory.Memory,
        x: Tensor,
        alpha: Scalar,
        answers: Sequence[Answer],
    ) -> tuple[Heard, dict[int, Tensor]]:
        """The weighted mean of what is heard, leaves [1, ...], and u_i [d] of each client.

        Answers are taken one by one: all of them at once would take five times their memory.
        """
        everybody = fsum(answer.weight for answer in answers)
        heard: Heard | None = None
        sums = {}
        for client, weight, update in answers:
            kept = self._kept(client, x)
            single, new = memory.hear(mean, x[None], alpha, update[None, None], kept)
            share = weight / everybody
            part: Heard = tree_map(lambda leaf, share=share: share * leaf[0], single)
            heard = part if heard is None else tree_map(torch.add, heard, part)
            sums[client] = new.u[0, 0]
        assert heard is not None  # there is an answer
        # A sum of shares may miss 1 by rounding, which would tell of a client that is new.
        known = fsum(answer.weight for answer in answers if answer.client in self.clients)
        return heard._replace(known=torch.full_like(heard.known, known / everybody)), sums

    def _without_the_lost(self, k: int) -> Self:
        """The memory without clients that have not answered for long."""
        lost = [client for client, entry in self.clients.items() if entry.unheard > FORGOTTEN]
        if not lost:
            return self
        log.info("round %d: client(s) %s are forgotten", k, ", ".join(map(str, lost)))
        clients = {one: entry for one, entry in self.clients.items() if one not in lost}
        return type(self)(clients, _used(self.models, clients))

    def _weights(self, now: Mapping[int, float], connected: Collection[int]) -> dict[int, float]:
        """n_i of all clients that are connected. `now` are those of the clients that answer."""
        weights = {}
        for client, entry in self.clients.items():
            if client in connected:
                weights[client] = entry.weight
        weights |= now
        usual = fsum(weights.values()) / len(weights)
        for client in connected:
            weights.setdefault(client, usual)
        return weights

    def _mean(self, x: Tensor, n: Mapping[int, float]) -> memory.Memory:
        """The memory before the round, as far as `memory.hear` needs it.

        Clients are added up in the order of their ids, so that a resumed run has the same sum.
        """
        everybody = fsum(n.values())
        total = torch.zeros_like(x, dtype=torch.float64)
        known = []
        for client in sorted(self.clients.keys() & n.keys()):
            total.add_(self.clients[client].u, alpha=n[client] / everybody)
            known.append(n[client])
        blank = memory.start(x[None], used=True)
        mass = torch.full_like(blank.mass, fsum(known) / everybody)
        return blank._replace(total=total.to(x.dtype)[None], mass=mass)

    def _kept(self, client: int, x: Tensor) -> Kept:
        """What is remembered of a client, leaves [1, 1, ...]."""
        entry = self.clients.get(client)
        if entry is None:
            kept = memory.blank(x[None])
        else:
            one = x.new_ones(1, 1)
            kept = Kept(entry.u[None], self.models[entry.k][None], one)
        return Kept(*[leaf[None] for leaf in kept])

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a later process needs to go on, by name. Empty if nobody is known."""
        if not self.clients:
            return {}
        entries = self.clients.values()
        numbers = [[entry.weight, entry.unheard] for entry in entries]
        rounds = [entry.k for entry in entries]
        found = {
            IDS: torch.tensor(list(self.clients), dtype=torch.uint64),
            ROUNDS: torch.tensor(rounds, dtype=torch.int64),
            NUMBERS: torch.tensor(numbers, dtype=torch.float64),
        }
        for client, entry in self.clients.items():
            found[f"{SUM}{client}"] = entry.u
        for k, model in self.models.items():
            found[f"{MODEL}{k}"] = model
        return found

    @classmethod
    def of(cls, x: Tensor, tensors: Mapping[str, Tensor]) -> Self:
        """The memory that `tensors` was made of; x [d] has the model's size, type and device.

        It is empty if the tensors tell nothing about clients.

        Raises:
            InputError: A vector does not belong to this model.
        """
        if IDS not in tensors:
            return cls()
        clients = {}
        models = {}
        ids = tensors[IDS].tolist()
        rounds = tensors[ROUNDS].tolist()
        numbers = tensors[NUMBERS].tolist()
        for client, k, (weight, unheard) in zip(ids, rounds, numbers, strict=True):
            u = _like(x, tensors[f"{SUM}{client}"])
            clients[client] = Client(weight, unheard, k, u)
            models[k] = _like(x, tensors[f"{MODEL}{k}"])
        return cls(clients, models)


def _used(models: Mapping[int, Tensor], clients: Mapping[int, Client]) -> dict[int, Tensor]:
    """The models that some client answered to last."""
    rounds = {entry.k for entry in clients.values()}
    return {k: model for k, model in models.items() if k in rounds}


def _like(x: Tensor, saved: Tensor) -> Tensor:
    """A saved vector, which must have the size and type of x."""
    if saved.shape != x.shape or saved.dtype != x.dtype:
        raise InputError(
            f"the saved memory of a client is {saved.dtype} of shape {tuple(saved.shape)}, this "
            f"model is {x.dtype} of shape {tuple(x.shape)}"
        )
    return saved.to(x.device)
