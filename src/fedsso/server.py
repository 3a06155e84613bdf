"""FedSSO's server for a federation that somebody else runs.

Each round it turns the model x_k and the clients' mean v_k into the next model x_{k+1}. The step is
that of the simulator, for one trial. Whoever runs the clients may round the model on the way, or
change it between rounds: s = x_k - x_{k-1} is then the difference of what the clients really saw.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from .algorithm import Cohort
from .algorithm.records import stack
from .algorithm.schedule import at
from .algorithms.cautious import PATIENCE
from .algorithms.fedsso import FedSSO, State
from .errors import MOST, InputError, number
from .support.linalg import dot
from .support.trees import named_leaves, tree_map

log = logging.getLogger("fedsso")
STORE = "server.curvature.store"  # pairs (s, y): most of the state, and empty at first


class Server:
    """The state of FedSSO between rounds.

    Args:
        record: FedSSO's settings. With guard="cautious" its alpha only sets the unit in which
            numbers are shown; else it must be the step that clients use.
        local_steps: tau, the clients' mean number of local steps; likewise.

    >>> server = Server(FedSSO(alpha=0.1), local_steps=2)
    >>> server.step(torch.tensor([1.0, 2.0]), torch.tensor([0.8, 1.6]))
    tensor([0.8000, 1.6000])
    >>> server.k
    1
    """

    def __init__(self, record: FedSSO, local_steps: float) -> None:
        if isinstance(record.alpha, str):
            raise InputError(
                "alpha='auto' needs clients that are told their step; give the number that yours "
                "use, as in alpha=0.01"
            )
        self.record = record
        self.local_steps = number("local_steps", local_steps)
        if not 1 <= self.local_steps < MOST:
            raise InputError(
                f"local_steps must be a number >= 1, the clients' mean tau, got {local_steps!r}"
            )
        self.k = 0  # the last round
        self.steps = 0  # steps taken: R counts these
        self.state: State | None = None  # until the first model is seen

    def step(
        self,
        x: Tensor,
        v: Tensor,
        k: int | None = None,
        loss: float | None = None,
    ) -> Tensor:
        """The next model [d], from this one and from the mean of what the clients made of it.

        Neither x nor v is changed.
        """
        return self.advance(x, v.detach() - x.detach(), k, loss)

    def advance(
        self,
        x: Tensor,
        delta: Tensor,
        k: int | None = None,
        loss: float | None = None,
    ) -> Tensor:
        """The next model [d], from this one and from the clients' mean update delta = v - x.

        `loss` is the clients' mean training loss of this round, if they report it; the cautious
        guard looks at it.

        It is more precise than `step` where alpha is small: x + delta would round away what counts.
        Rounds count 1, 2, ... unless k says otherwise, since the server may have sat out some. The
        schedules of step sizes go by the round.
        """
        x = x.detach()
        if k is None:
            k = self.k + 1
        if delta.shape != x.shape or k <= self.k:
            raise InputError(
                f"x and v must be vectors of one length, in round {self.k + 1} or later; got "
                f"{tuple(x.shape)}, {tuple(delta.shape)}, round {k}"
            )
        heard = None
        if loss is not None:
            heard = torch.tensor([[loss]], dtype=torch.float64, device=x.device)
        cohort = Cohort(self.steps + 1, 1, torch.arange(1), 1.0, self.local_steps, heard)
        algorithm = stack([self._record_of(k)], x.dtype, x.device)
        with torch.no_grad():
            before = self._at(x)
            self.state = algorithm.server(before, delta.detach().unsqueeze(0), cohort)
        _tell_falls(before, self.state, k)
        self.k = k
        self.steps += 1
        return self.state.x[0].clone()

    def _record_of(self, k: int) -> FedSSO:
        """The record with the step sizes of round k."""
        record: Any = self.record
        now = replace(record, alpha=at(record.alpha, k), eta=at(record.eta, k))
        return cast(FedSSO, now)

    def _blank(self, x: Tensor) -> State:
        """The state before the first round, from a model x [1, d]."""
        return stack([self.record], x.dtype, x.device).server_init(x)

    def _at(self, x: Tensor) -> State:
        """The state with x [d] as its model.

        If somebody has changed the model since the last step, the way to x counts as that step. The
        guard takes B s = -t g for granted. This is then true along the server's own step, which is
        the only direction it knows.
        """
        x = x.unsqueeze(0)
        state = self.state
        if state is None:
            return self._blank(x.clone())
        if x.shape != state.x.shape:
            raise InputError(
                f"the model has {x.shape[-1]} parameters, in earlier rounds it had "
                f"{state.x.shape[-1]}"
            )
        if torch.equal(x, state.x):
            return state
        s = state.s + (x - state.x)
        guard = state.guard
        slope = -dot(state.g, s)
        known = (slope > 0) & (guard.slope > 0)
        share = torch.where(known, guard.share * slope / guard.slope, guard.share)
        moved = guard._replace(slope=slope, share=share)
        return state._replace(x=x.clone(), s=s, guard=moved)

    def diagnostics(self) -> dict[str, float]:
        """What is known of the last step.

        The names are ys, overridden, skipped, grad_norm, radius (NaN without the guard) and gamma.
        """
        if self.state is None:
            return {}
        told = self.record.diagnostics(self.state)
        return {name: float(value[0]) for name, value in told.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a later process needs to go on, by name."""
        if self.state is None:
            return {}
        counts = {"k": torch.tensor(self.k), "steps": torch.tensor(self.steps)}
        return counts | packed(self.state, self.steps)

    def restore(self, x: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Go on from `tensors()`; x [d] has the model's size, type and device."""
        state = unpacked(self._blank(x.detach().unsqueeze(0)), tensors)
        none = torch.tensor(0)
        k = int(tensors.get("k", none))
        steps = int(tensors.get("steps", none))
        if not 1 <= steps <= k:
            raise InputError(f"the saved state counts {steps} steps in {k} rounds")
        self.state = state
        self.k = k
        self.steps = steps


def _tell_falls(before: State, after: State, k: int) -> None:
    """Say in words if the cautious guard went back."""
    falls = int(after.net.falls.sum())
    if falls == int(before.net.falls.sum()):
        return
    log.warning(
        "FedSSO: round %d: the last step made things worse; going back to an earlier model, and "
        "B starts anew (%d of %d times, then the server only averages)",
        k,
        falls,
        PATIENCE,
    )


# ---- saved states ----


def packed(state: Any, steps: int) -> dict[str, Tensor]:
    """An algorithm's state by the names of its leaves.

    Of a store of pairs, only the slots are taken that so many steps have used.
    """
    tensors = dict(named_leaves(state, "server"))
    if STORE in tensors:
        tensors[STORE] = tensors[STORE][:, :steps]
    return tensors


def unpacked(blank: Any, tensors: Mapping[str, Tensor]) -> Any:
    """A blank state filled with what `packed` gave."""
    names = [name for name, _ in named_leaves(blank, "server")]
    missing = [name for name in names if name not in tensors]
    if missing:
        raise InputError(
            f"the saved state lacks {', '.join(missing)}; it belongs to another form, algorithm or "
            "version of fedsso: go on with that one, or start anew"
        )
    todo = iter(names)

    def fill(leaf: Tensor) -> Tensor:
        name = next(todo)
        return _written(leaf, name, tensors[name])

    return tree_map(fill, blank)


def _written(
    leaf: Tensor,
    name: str,
    saved: Tensor,
) -> Tensor:
    """A saved tensor in the shape of a blank one; of the store, only slots in use were saved."""
    leaf = leaf.clone()
    room = leaf
    if name == STORE and saved.dim() == leaf.dim():
        room = leaf[:, : saved.shape[1]]
    if room.shape != saved.shape or room.dtype != saved.dtype:
        raise InputError(
            f"the saved {name} is {saved.dtype} of shape {tuple(saved.shape)}, this model's is "
            f"{leaf.dtype} of shape {tuple(leaf.shape)}"
        )
    room.copy_(saved)
    return leaf
