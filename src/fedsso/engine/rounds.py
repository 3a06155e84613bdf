"""All randomness of a run, as data: who takes part in a round, who answers, which rows are seen.

Every draw is a pure function of the seed and a purpose. These are all the streams of a run:

    purpose    depends on                what is drawn
    cohort     round, sample             the clients that receive the model
    drop       round, sample             who of them never answers
    late       round                     who is slow
    steps      round                     how many of its local steps a slow client takes
    rows       client, epoch             the order of the client's rows in that epoch
    module     client, position, round   seeds of modules that draw, such as dropout (gather.py)
    own words  client, round             what an algorithm's clients draw (`Local.uniform`)

So all algorithms of a comparison see the same cohorts and mini-batches, and draws of one purpose
do not move those of another. A checkpoint holds no generator: only each client's position in its
stream of mini-batches. The initial model of a name is drawn from the same seed, the partition of
the data is not.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..support.rng import generator
from ..support.shuffle import first_of_permutation

if TYPE_CHECKING:
    from ..data import Federation
    from .settings import Settings

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
EPOCHS = 1 << 16  # clients whose shuffled rows are kept


class Plan(NamedTuple):
    """The draws of one round, or of one sample of it: three int64 vectors.

    Clients are numbered from 0, in ascending order. `answered` is a part of `chosen` and may be
    empty.
    """

    chosen: Tensor  # clients that receive the model
    answered: Tensor  # those of them whose update arrives
    steps: Tensor  # tau of the latter

    @property
    def lead(self) -> Plan:
        """The first client that answers alone; nobody, if none does."""
        first = self.answered[:1]
        return Plan(first, first, self.steps[:1])


class Rounds:
    """Draws of a run, and each client's endless stream of reshuffled mini-batches.

    Args:
        fed: The federation; its rows stay where they are.
        settings: Seed, batch size, local steps and the shares of absent and slow clients.
        first: The number that client 0 goes by in draws of its own. A client on a network holds a
            federation of itself alone, and so draws what it would as number `first` of a
            simulation.

    For each client, `sizes` are its training rows, `width` the rows of its full mini-batches and
    `per_epoch` the mini-batches of one pass over its rows.
    """

    def __init__(self, fed: Federation, settings: Settings, first: int = 0) -> None:
        self.settings = settings
        self.first = first  # the number that client 0 goes by in all draws
        self.start = fed.train_start.cpu().numpy()
        self.rows = fed.train_rows.cpu().numpy()
        self.sizes: Ints = np.diff(self.start)
        size = settings.batch_size
        self.width: Ints = self.sizes if size is None else np.minimum(self.sizes, size)
        self.per_epoch: Ints = -(-self.sizes // self.width)
        self._one_batch = bool((self.per_epoch == 1).all())
        self._epochs: dict[int, tuple[int, Ints]] = {}

    def plan(self, k: int, sample: int = 0) -> Plan:
        """Who takes part in round k = 1, 2, ..., who answers, and after how many local steps.

        Args:
            k: The round.
            sample: 0 for the round's first cohort. An algorithm that asks for a new sample of
                clients within a round gets numbers 1, 2, ...

        A cohort has round(participation * clients) members, at least one. Who is slow is the same
        in all samples of a round.
        """
        p = self.settings
        if not p.some_absent and not p.stragglers:
            return self._everybody
        return self._drawn(k, sample)

    @cached_property
    def _everybody(self) -> Plan:
        """The plan of every round where nothing is drawn."""
        return self._drawn(1, 0)

    def _drawn(self, k: int, sample: int) -> Plan:
        """The plan of one sample of a round."""
        p = self.settings
        n = len(self.sizes)
        again = (sample,) if sample else ()
        size = p.asked(n)
        if size < n:
            members = first_of_permutation(n, size, p.seed, "cohort", k, *again)
            chosen = torch.from_numpy(np.sort(members))
        else:
            chosen = torch.arange(n)
        answered = chosen
        if p.drop_rate:
            answered = chosen[self._uniform("drop", k, *again)[chosen] >= p.drop_rate]
        if p.local_epochs is not None:
            tau = torch.from_numpy(self.per_epoch[answered.numpy()]) * p.local_epochs
        else:
            tau = torch.full_like(answered, p.local_steps or 0)
        # A slow client takes 1 to tau steps, all equally likely: 1 + floor(u tau) for u uniform
        # in [0, 1).
        if p.stragglers:
            # A slow client is slow for the whole round.
            late = self._uniform("late", k)[answered] < p.stragglers
            share = self._uniform("steps", k)[answered]
            tau = torch.where(late, 1 + (share * tau).long(), tau)
        return Plan(chosen, answered, tau)

    def _uniform(self, purpose: str, *when: int) -> Tensor:
        """One number in [0, 1) for every client of the federation, float64 [clients].

        It is drawn for all clients, also for those outside the cohort, so that a client's number
        does not depend on who else is chosen.
        """
        return torch.rand(
            len(self.sizes),
            generator=generator(self.settings.seed, purpose, *when),
            dtype=torch.float64,
        )

    def own_uniform(self, purpose: str, client: int, k: int, n: int) -> Tensor:
        """A client's own n draws in round k, float64 [n] inside (0, 1).

        0 itself is left out, because these numbers also go into inverse distribution functions,
        which are infinite there.
        """
        draw = generator(self.settings.seed, purpose, self.first + client, k)
        return torch.rand(n, generator=draw, dtype=torch.float64).clamp_(min=2**-54)

    def constant(self, clients: Ints) -> bool:
        """Whether every step of these clients sees the same rows: all that each of them has.

        Then one gathered batch serves all local steps.
        """
        return self._one_batch or bool((self.per_epoch[clients] == 1).all())

    def batches(self, client: int, step: int, most: int) -> Ints:
        """The next mini-batches of a client, as many equally wide ones as come in a row.

        Args:
            client: Its index in the federation.
            step: The number of the first one, counted from 0 over the whole run.
            most: How many are wanted.

        Returns:
            Row numbers of the federation, [n, width] with 1 <= n <= most. The caller asks again
            for the rest. A block ends with its epoch, because rows are shuffled anew there; the
            last batch of an epoch may be short and then comes alone, [1, fewer].
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
        """The client's row numbers in the order of an epoch.

        The newest epoch of each client is kept, of very many clients that of the last ones. Where a
        batch is all rows, their order does not matter, and they are never shuffled.
        """
        if self.per_epoch[client] == 1:
            epoch = 0
        kept = self._epochs.get(client)
        if kept is None or kept[0] != epoch:
            own = self.rows[self.start[client] : self.start[client + 1]]
            if self.per_epoch[client] > 1:
                draw = generator(self.settings.seed, "rows", self.first + client, epoch)
                own = own[torch.randperm(len(own), generator=draw).numpy()]
            if len(self._epochs) >= EPOCHS:
                self._epochs.clear()
            kept = self._epochs[client] = epoch, own
        return kept[1]
