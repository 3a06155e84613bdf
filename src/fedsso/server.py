"""FedSSO's server for a federation that somebody else runs.

Each round it turns the model x_k and the clients' mean v_k into the next model x_{k+1}. The step is
that of the simulator, for one trial. Whoever runs the clients may round the model on the way, or
change it between rounds: s = x_k - x_{k-1} is then the difference of what the clients really saw.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .algorithm import Cohort
from .algorithm.contract import Attendance
from .algorithm.records import stack
from .algorithm.schedule import at
from .algorithms import memory
from .algorithms.cautious import PATIENCE
from .algorithms.fedsso import FedSSO, State
from .algorithms.layers import suit
from .errors import MOST, InputError, number
from .objective import Layout
from .support.linalg import dot
from .support.trees import named_leaves, tree_map

log = logging.getLogger("fedsso")
STORE = "server.curvature.store"  # pairs (s, y): most of the state, and empty at first
MEMORY = "server.memory."  # how the leaves of the memory begin
METRIC = "server.moments"  # and those of the metric
LONGEST = "server.net.longest"  # what older versions did not save


class Answers(NamedTuple):
    """What the clients of a round sent, and what the server remembers: for memory="clients".

    `remembered.Remembered` makes it.
    """

    heard: memory.Heard
    """The weighted mean over the clients that answered, leaves [1, ...]."""
    size: int
    """How many clients answered."""
    mass: float
    """Their share of the weights of all clients, at most 1."""
    total: Tensor
    """The sum of p_i o_i over the clients that were known before this round, [1, d]."""
    known: float
    """The sum of their p_i."""


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
                "alpha='auto' needs clients that receive their step size from the server; "
                "give the one that yours use, as in alpha=0.01"
            )
        if record.by_client:  # a server that sees only means learns from them, as for a network
            record = replace(record, drift="gentle")
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
        delta: Tensor | Answers,
        k: int | None = None,
        loss: float | None = None,
    ) -> Tensor:
        """The next model [d], from this one and from the clients' mean update delta = v - x.

        `delta` [d] is that mean, or, with memory="clients", what `remembered.Remembered` makes of
        the single updates.

        `loss` is the clients' mean training loss of this round, if they report it; the cautious
        guard looks at it.

        It is more precise than `step` where alpha is small: x + delta would round away what counts.
        Rounds count 1, 2, ... unless k says otherwise, since the server may have sat out some. The
        schedules of step sizes go by the round.
        """
        x = x.detach()
        if k is None:
            k = self.k + 1
        mean: Tensor | memory.Heard
        if isinstance(delta, Answers):
            mean = delta.heard
            update = mean.delta[0]
        else:
            update = delta.detach()
            mean = update.unsqueeze(0)
        if update.shape != x.shape or k <= self.k:
            raise InputError(
                f"x and v must be vectors of one length, in round {self.k + 1} or later; got "
                f"{tuple(x.shape)}, {tuple(update.shape)}, round {k}"
            )
        algorithm = stack([self._record_of(k)], x.dtype, x.device)
        with torch.no_grad():
            before = self._at(x)
            if isinstance(delta, Answers):
                before = before._replace(memory=_recalled(before.memory, delta))
            self.state = algorithm.server(before, mean, self._cohort(delta, loss, x.device))
        _tell_falls(before, self.state, k)
        self.k = k
        self.steps += 1
        return self.state.x[0].clone()

    def _cohort(
        self,
        delta: Tensor | Answers,
        loss: float | None,
        device: torch.device,
    ) -> Cohort:
        """Who answered. A server that is given a mean takes it for that of all clients."""
        told = None
        if loss is not None:
            told = torch.tensor([[loss]], dtype=torch.float64, device=device)
        size = 1
        mass = 1.0
        if isinstance(delta, Answers):
            size = delta.size
            mass = delta.mass
        return Cohort(self.steps + 1, size, torch.arange(size), mass, self.local_steps, told)

    def fit(self, layout: Layout) -> None:
        """Decide shapes="auto" and drift="auto" for a model, before its first step.

        The metric of a model of one layer needs single gradients, which this server never sees.
        """
        fitted: Any = self.record.fit(layout.layers, [tuple(shape) for shape in layout.shapes])
        self.record = replace(fitted, shapes="none") if fitted.by_client else fitted

    def join(self, attendance: Attendance, d: int) -> None:
        """Decide memory="auto" for this federation and a model of d parameters.

        Where the memory begins after some rounds, everything else goes on as it was.
        """
        joined: Any = self.record.join(attendance, d)
        # Without `fit`, drift="auto" would become that of a model of one layer.
        self.record = cast(FedSSO, replace(joined, drift=self.record.drift))
        state = self.state
        if state is not None and self.record.remembers and not state.memory.total.numel():
            self.state = state._replace(memory=memory.start(state.x, used=True))

    def _record_of(self, k: int) -> FedSSO:
        """The record with the step sizes of round k."""
        record: Any = self.record
        now = replace(record, alpha=at(record.alpha, k), eta=at(record.eta, k))
        return cast(FedSSO, now)

    def _blank(self, x: Tensor) -> State:
        """The state before the first round, from a model x [1, d]."""
        suit(self.record.shapes, [x.shape[-1]])
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

        The names are ys, overridden, skipped, grad_norm, radius (NaN without the guard) and gamma,
        with guard="cautious" also stretch and falls, with a memory also beta and known.
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
        """Go on from `tensors()`; x [d] has the model's size, type and device.

        A state that was saved with a memory decides memory="auto", and one that was saved without
        a metric goes on without.
        """
        if not any(name.startswith(METRIC) for name in tensors):
            self.record = replace(self.record, shapes="none")
        if _has_memory(tensors):
            self.join(Attendance(some_absent=True), 0)
        state = unpacked(self._blank(x.detach().unsqueeze(0)), tensors)
        none = torch.tensor(0)
        k = int(tensors.get("k", none))
        steps = int(tensors.get("steps", none))
        if not 1 <= steps <= k:
            raise InputError(f"the saved state counts {steps} steps in {k} rounds")
        self.state = state
        self.k = k
        self.steps = steps


def _recalled(before: memory.Memory, answers: Answers) -> memory.Memory:
    """The memory with the weights of this round, in which clients may have come or gone."""
    mass = torch.full_like(before.mass, answers.known)
    return before._replace(total=answers.total, mass=mass)


def _has_memory(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a saved state has a memory of clients."""
    total = tensors.get(f"{MEMORY}total")
    return total is not None and total.numel() > 0


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
    """A blank state filled with what `packed` gave.

    A state of a version without a memory of clients goes on with a blank one; one of a version that
    did not bound the cautious guard's radius, as if all updates before had been short.
    """
    of_blank = dict(named_leaves(blank, "server"))
    names = list(of_blank)
    older = not any(name.startswith(MEMORY) for name in tensors)
    added = (MEMORY, LONGEST) if older else LONGEST
    blanks = {name: leaf for name, leaf in of_blank.items() if name.startswith(added)}
    tensors = {**blanks, **tensors}
    missing = [name for name in names if name not in tensors]
    if missing:
        raise InputError(
            f"the saved state lacks {', '.join(missing)}; it belongs to another form, algorithm or "
            "version of fedsso: use that one, or start over"
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
