"""FedSSO's server for a federation that somebody else runs: from x_k and the clients' mean v_k to
x_{k+1}.

The step is that of the simulator, for one trial. Whoever runs the clients may round the model on
the way or change it between rounds; s is then what the clients really saw, x_k - x_{k-1}.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from .algorithm import Cohort
from .algorithm.records import stack
from .algorithm.schedule import at
from .algorithms.fedsso import FedSSO, State
from .errors import MOST, InputError, number
from .support.linalg import dot
from .support.trees import named_leaves, tree_map

STORE = "server.curvature.store"  # pairs (s, y): most of the state, and empty at first


class Server:
    """The state of FedSSO between rounds.

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
        self.record, self.local_steps = record, number("local_steps", local_steps)
        if not 1 <= self.local_steps < MOST:
            raise InputError(
                f"local_steps must be a number >= 1, the clients' mean tau, got {local_steps!r}"
            )
        self.k = 0  # the last round
        self.steps = 0  # steps taken: R counts these
        self.state: State | None = None  # until the first model is seen

    def step(self, x: Tensor, v: Tensor, k: int | None = None) -> Tensor:
        """The next model [d] from this one and the mean of what clients made of it; neither is
        changed."""
        return self.advance(x, v.detach() - x.detach(), k)

    def advance(self, x: Tensor, delta: Tensor, k: int | None = None) -> Tensor:
        """The same from delta = v - x, for who has it: at small alpha the sum would round away what
        counts.

        Rounds count 1, 2, ... unless k says otherwise: the server may have sat out some. Step sizes
        go by the round.
        """
        x, k = x.detach(), self.k + 1 if k is None else k
        if delta.shape != x.shape or k <= self.k:
            raise InputError(
                f"x and v must be vectors of one length, in round {self.k + 1} or later; got "
                f"{tuple(x.shape)}, {tuple(delta.shape)}, round {k}"
            )
        cohort = Cohort(self.steps + 1, 1, torch.arange(1), 1.0, self.local_steps)
        now = replace(
            cast(Any, self.record), alpha=at(self.record.alpha, k), eta=at(self.record.eta, k)
        )
        with torch.no_grad():
            self.state = stack([now], x.dtype, x.device).server(
                self._at(x), delta.detach().unsqueeze(0), cohort
            )
        self.k, self.steps = k, self.steps + 1
        return self.state.x[0].clone()

    def _algorithm(self, x: Tensor) -> FedSSO:
        return stack([self.record], x.dtype, x.device)

    def _at(self, x: Tensor) -> State:
        """The state with x as its model; where that is not the model of the last step, the step to
        it counts.

        The guard's B s = -t g then is true along the server's own step, the only direction it
        knows.
        """
        x = x.unsqueeze(0)
        if self.state is None:
            return self._algorithm(x).server_init(x.clone())
        state = self.state
        if x.shape != state.x.shape:
            raise InputError(
                f"the model has {x.shape[-1]} parameters, in earlier rounds it had "
                f"{state.x.shape[-1]}"
            )
        if torch.equal(x, state.x):
            return state
        s, guard = state.s + (x - state.x), state.guard
        slope = -dot(state.g, s)
        share = torch.where(
            (slope > 0) & (guard.slope > 0), guard.share * slope / guard.slope, guard.share
        )
        return state._replace(x=x.clone(), s=s, guard=guard._replace(slope=slope, share=share))

    def diagnostics(self) -> dict[str, float]:
        """What the last step knows: ys, overridden, skipped, grad_norm, radius (NaN without the
        guard), gamma."""
        if self.state is None:
            return {}
        return {
            name: float(value[0]) for name, value in self.record.diagnostics(self.state).items()
        }

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a later process needs to go on, by name."""
        if self.state is None:
            return {}
        numbers = {"k": torch.tensor(self.k), "steps": torch.tensor(self.steps)}
        return numbers | packed(self.state, self.steps)

    def restore(self, x: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Go on from `tensors()`; x [d] has the model's size, type and device."""
        state = unpacked(self._algorithm(x).server_init(x.detach().unsqueeze(0)), tensors)
        k, steps = (int(tensors.get(name, torch.tensor(0))) for name in ("k", "steps"))
        if not 1 <= steps <= k:
            raise InputError(f"the saved state counts {steps} steps in {k} rounds")
        self.state, self.k, self.steps = state, k, steps


def packed(state: Any, steps: int) -> dict[str, Tensor]:
    """An algorithm's state by the names of its leaves; of a store of pairs, the slots in use."""
    tensors = dict(named_leaves(state, "server"))
    return {name: leaf[:, :steps] if name == STORE else leaf for name, leaf in tensors.items()}


def unpacked(blank: Any, tensors: Mapping[str, Tensor]) -> Any:
    """A blank state filled with what `packed` gave."""
    names = [name for name, _ in named_leaves(blank, "server")]
    missing = [name for name in names if name not in tensors]
    if missing:
        raise InputError(
            f"the saved state lacks {', '.join(missing)}; it belongs to another form, algorithm or "
            f"version"
        )
    parts = iter([(name, tensors[name]) for name in names])
    return tree_map(lambda leaf: _written(leaf, *next(parts)), blank)


def _written(leaf: Tensor, name: str, saved: Tensor) -> Tensor:
    """A saved tensor in the shape of a blank one: of the store, the slots that were in use."""
    slots = saved.shape[1] if name == STORE and saved.dim() == leaf.dim() else None
    leaf = leaf.clone()
    room = leaf[:, :slots] if slots is not None else leaf
    if room.shape != saved.shape or room.dtype != saved.dtype:
        raise InputError(
            f"the saved {name} is {saved.dtype} of shape {tuple(saved.shape)}, this model's is "
            f"{leaf.dtype} of shape "
            f"{tuple(leaf.shape)}"
        )
    room.copy_(saved)
    return leaf
