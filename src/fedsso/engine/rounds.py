"""All randomness of a run, as data: who takes part in round k, who answers, how far each gets, and
which rows it sees.

Every draw is a pure function of (seed, purpose, client, round or epoch). So all algorithms of a
comparison see the same cohorts and mini-batches, and a checkpoint holds no generator: only each
client's position in its stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..support.rng import generator

if TYPE_CHECKING:
    from ..data import Federation
    from .settings import Settings

Ints = NDArray[np.int64]


class Plan(NamedTuple):
    """The draws of one round."""

    chosen: Tensor  # clients that receive the model
    answered: Tensor  # those of them whose update arrives
    steps: Tensor  # tau of the latter


class Rounds:
    """Draws of a run, and each client's endless stream of reshuffled mini-batches."""

    def __init__(self, fed: Federation, settings: Settings, first: int = 0) -> None:
        self.settings = settings
        self.first = first  # the number that client 0 goes by in all draws
        self.start = fed.train_start.cpu().numpy()
        self.rows = fed.train_rows.cpu().numpy()
        self.sizes: Ints = np.diff(self.start)
        size = settings.batch_size
        self.width: Ints = self.sizes if size is None else np.minimum(self.sizes, size)
        self.per_epoch: Ints = -(-self.sizes // self.width)
        self._epochs: dict[int, tuple[int, Ints]] = {}

    def plan(self, k: int, sample: int = 0) -> Plan:
        """Who takes part in round k, who answers, and after how many local steps; a round may draw
        a second sample."""
        p = self.settings
        n = len(self.sizes)
        again = (sample,) if sample else ()
        chosen = torch.arange(n)
        size = max(1, round(p.participation * n))
        if size < n:
            chosen = (
                torch.randperm(n, generator=generator(p.seed, "cohort", k, *again))[:size]
                .sort()
                .values
            )
        answered = chosen
        if p.drop_rate:
            answered = chosen[self._uniform("drop", k, *again)[chosen] >= p.drop_rate]
        if p.local_epochs is not None:
            tau = torch.from_numpy(self.per_epoch) * p.local_epochs
        else:
            tau = torch.full((n,), p.local_steps or 0)
        if p.stragglers:
            late = (
                self._uniform("late", k) < p.stragglers
            )  # a slow client is slow for the whole round
            tau = torch.where(late, 1 + (self._uniform("steps", k) * tau).long(), tau)
        return Plan(chosen, answered, tau[answered])

    def _uniform(self, purpose: str, *when: int) -> Tensor:
        return torch.rand(
            len(self.sizes),
            generator=generator(self.settings.seed, purpose, *when),
            dtype=torch.float64,
        )

    def own_uniform(self, purpose: str, client: int, k: int, n: int) -> Tensor:
        """A client's own draws in round k, inside (0, 1)."""
        draw = generator(self.settings.seed, purpose, self.first + client, k)
        return torch.rand(n, generator=draw, dtype=torch.float64).clamp_(min=2**-54)

    def constant(self, clients: Ints) -> bool:
        """Whether every step of these clients sees the same rows (all they have)."""
        return bool((self.per_epoch[clients] == 1).all())

    def batches(self, client: int, step: int, most: int) -> Ints:
        """Rows [n, width] of a client's mini-batches number `step`, ... since the beginning: as
        many equal ones as come in a row, at most `most`. The last batch of an epoch may be short.
        """
        epoch, b = divmod(step, int(self.per_epoch[client]))
        width = int(self.width[client])
        rows = self._shuffled(client, epoch)
        n = min(most, len(rows) // width - b)
        return (
            rows[b * width : (b + n) * width].reshape(n, width)
            if n > 0
            else rows[None, b * width :]
        )

    def _shuffled(self, client: int, epoch: int) -> Ints:
        """The client's rows in the order of an epoch; where a batch is all rows, their order does
        not matter."""
        if self.per_epoch[client] == 1:
            epoch = 0
        kept = self._epochs.get(client)
        if kept is None or kept[0] != epoch:
            own = self.rows[self.start[client] : self.start[client + 1]]
            if self.per_epoch[client] > 1:
                draw = generator(self.settings.seed, "rows", self.first + client, epoch)
                own = own[torch.randperm(len(own), generator=draw).numpy()]
            kept = self._epochs[client] = epoch, own
        return kept[1]
