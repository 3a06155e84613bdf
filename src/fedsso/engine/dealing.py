"""What a simulation on several processes needs beside that of one: who computes whom, and sums.

`Dealing` is what `Trials` asks. `ranks.py` says how the processes talk to each other, and why a
client lives where it does.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from ..support.trees import Tree, leaves, tree_map
from .ranks import Team, checksum, deal
from .rounds import Ints
from .uplink import client_of

if TYPE_CHECKING:
    from ..algorithm.contract import Phase
    from .per_client import PerClient
    from .state import State


class Met(NamedTuple):
    """What all processes know alike at the end of a round."""

    up: Tensor  # bytes that clients have sent, [trials]
    sound: Tensor  # which trials all processes find sound, [trials]
    spent: dict[str, float]  # what the all-reduces have taken, for the row of the trace


class Dealing:
    """Deals the clients of a run to the processes of a team, and sums up over them.

    Args:
        team: The processes.
        sizes: The rows of each client.
        keeps: Whether something is kept for each client between rounds, so that it has a home.
    """

    def __init__(self, team: Team, sizes: Ints, keeps: bool) -> None:
        self.team = team
        self.homes = deal(sizes, team.size) if keeps and team.size > 1 else None
        everybody = np.arange(len(sizes))
        # The clients that live in this process, in their order.
        self.residents = everybody if self.homes is None else everybody[self.homes == team.rank]

    def ranks(self, who: Ints, work: Ints) -> Ints:
        """The process that computes each of these clients.

        Clients without a home are dealt by their work.
        """
        if self.team.size == 1:
            return np.zeros(len(who), np.int64)
        return deal(work, self.team.size) if self.homes is None else self.homes[who]

    def lender(self, ranks: Ints) -> int | None:
        """The first process that has clients, if another one has none; else None."""
        busy = np.unique(ranks)
        return int(busy[0]) if 0 < len(busy) < self.team.size else None

    # ---- sums ----

    def filled(
        self,
        phase: Phase,
        mean: Tree,
        loss: Tensor | None,
        lender: int | None,
        device: torch.device,
    ) -> tuple[Tree, Tensor | None]:
        """Mean and loss of this process; where it has no clients, what adds nothing to others'.

        Only who has clients knows the shape of their uploads, which may change from round to round.
        The lender tells it.
        """
        if lender is None:
            return mean, loss
        mine: Tree = ()
        if mean is not None:
            mine = tree_map(_shape_of, (mean, () if loss is None else loss))
        shape = self.team.share(mine, lender)
        if mean is not None:
            return mean, loss
        mean, told = tree_map(lambda leaf: torch.zeros_like(leaf, device=device), shape)
        if phase.largest:
            least = {name: getattr(mean, name) - torch.inf for name in phase.largest}
            mean = mean._replace(**least)
        return mean, told if isinstance(told, Tensor) else None

    def exchanged(
        self, phase: Phase, mean: Tree, loss: Tensor | None, moved: Tensor
    ) -> tuple[Tree, Tensor | None, Tensor]:
        """Mean, loss and change of the buffers over the clients of all processes.

        One all-reduce carries them. The loss is rounded on its way to the type of the buffers,
        which is that of the run. Maxima travel in a row for each process, of which the largest is
        taken.
        """
        if phase.largest:
            rows = {name: self.team.apart(getattr(mean, name)) for name in phase.largest}
            mean = mean._replace(**rows)
        told = () if loss is None else loss.to(moved.dtype)
        mean, told, moved = self.team.sum((mean, told, moved))
        if phase.largest:
            most = {name: getattr(mean, name).amax(0) for name in phase.largest}
            mean = mean._replace(**most)
        return mean, None if loss is None else told.double(), moved

    def meet(self, tried: State, sound: Tensor, up: Tensor, began: float) -> Met:
        """The end of a round, where all processes come to know the same.

        Args:
            tried: The state that the exchanges led to.
            sound: Which trials this process finds sound, [trials].
            up: Bytes that the clients of this process have sent, [trials].
            began: When the round began, by `time.perf_counter()`.

        `team.halts` is set in all of them if one was asked to stop.

        Raises:
            InputError: The processes have come to different models.
        """
        team = self.team
        model = float(checksum(next(leaves(tried.server))))
        spent = team.spent
        clock = torch.zeros(3, dtype=torch.float64)
        if team.is_first:
            told = [time.perf_counter() - began, spent.seconds, float(spent.bytes)]
            clock = torch.tensor(told, dtype=torch.float64)
        about = torch.tensor([model, float(team.asked)], dtype=torch.float64)
        device = up.device
        bad = (~sound).double()
        up, bad, about, clock = team.sum((up, bad, about.to(device), clock.to(device)))
        if float(about[0]) != model * team.size:
            raise InputError(
                f"the processes of this run have come to different models in round {tried.k}: "
                "their processors compute differently; use machines of one kind"
            )
        team.halts = bool(about[1] > 0)
        seconds, reduce_seconds, reduce_bytes = clock.tolist()
        taken = {"seconds": seconds, "reduce_seconds": reduce_seconds}
        return Met(up, bad == 0, {**taken, "reduce_bytes": reduce_bytes})

    # ---- states of clients, for checkpoints ----

    def collected(self, state: State, initial: Mapping[str, PerClient[Tree]]) -> State:
        """The state; in the first process with the states of clients that live elsewhere.

        Clients that are as they were at first are not sent.

        Args:
            state: What this process holds.
            initial: What it held of every client at first, by the name of the field.
        """
        if self.homes is None:
            return state
        changed: dict[str, dict[int, list[Tensor]]] = {}
        for name, first in initial.items():
            held = getattr(state, name)
            changed[name] = {i: _on_cpu(held[i]) for i in held.changed_from(first)}
        errors = {name: error.cpu() for name, error in state.errors.items()}
        everything: dict[str, Any] = {name: getattr(state, name).copy() for name in initial}
        every_error: dict[str, Tensor] = {}
        device = state.buffers.device
        for trees, owed in self.team.gather((changed, errors)):
            for name, clients in trees.items():
                like = initial[name]
                whole = [_tree_of(parts, like[i]) for i, parts in clients.items()]
                everything[name].put(list(clients), whole)
            every_error |= {name: error.to(device) for name, error in owed.items()}
        return state._replace(errors=every_error, **everything)

    def dispersed(self, state: State, initial: Mapping[str, PerClient[Tree]]) -> State:
        """A whole state without what belongs to clients that live in other processes."""
        if self.homes is None:
            return state
        here = self.residents.tolist()
        own: dict[str, Any] = {}
        for name, first in initial.items():
            own[name] = first.copy()
            own[name].put(here, getattr(state, name).take(here))
        errors = {}
        for name, error in state.errors.items():
            if self.homes[client_of(name)] == self.team.rank:
                errors[name] = error
        return state._replace(errors=errors, **own)


def _shape_of(leaf: Tensor) -> Tensor:
    """A leaf without its numbers."""
    return leaf.to("meta")


def _on_cpu(tree: Tree) -> list[Tensor]:
    """The leaves of a tree, as other processes can take them."""
    return [leaf.cpu() for leaf in leaves(tree)]


def _tree_of(parts: Sequence[Tensor], like: Tree) -> Tree:
    """A tree of the shape of another, with these leaves in order, on its device."""
    each = iter(parts)
    return tree_map(lambda leaf: next(each).to(leaf.device), like)
