"""FedPer. Arivazhagan et al., "Federated Learning with Personalization Layers", arXiv 1912.00818.

    x       the shared part, base layers W_B
    own     a client's part, its head W_P
    alpha   client step
    layers  how many of the last layers stay with the client, K_P

Clients take tau local SGD steps on all layers. The server averages the base; the heads never leave
their clients, so every client has a model of its own. The heads of clients that take part rarely
are old.

Only the base travels, d - own numbers each way. A model is evaluated on its own client's rows.
The server never sees a whole model, so `fit` must know the sizes of the layers before it starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ...algorithm import (
    Algorithm,
    Cohort,
    Local,
    Objective,
    Reply,
    Step,
    at,
    at_least,
    hyper,
    norm,
    param,
    positive,
)
from ...algorithm import local as solver
from ...errors import InputError


class State(NamedTuple):
    """Server state."""

    x: Tensor  # [trials, d - own]
    grad_norm: Tensor  # [trials, 1] length of (x_k - v_k) / (alpha tau)


@hyper
class FedPer(Algorithm):
    """FedAvg on all but the last layers, which stay private to each client.

    >>> FedPer(layers=1).fit([640, 330]).own
    330
    """

    alpha: Step = param(default=0.01, doc="client step size α")
    layers: int = param(default=1, doc="number K_P of last layers that stay with the client")
    own: int = param(
        default=0, doc="number of last entries of x that stay with the client; 0: those of `layers`"
    )
    personal = True

    def __post_init__(self) -> None:
        positive(self, "alpha")
        at_least(self, "layers", 1)
        at_least(self, "own", 0)

    def fit(
        self,
        sizes: Sequence[int],
        shapes: Sequence[Sequence[int]] = (),  # noqa: ARG002
    ) -> Self:
        """The record with `own` filled in: the numbers of the last `layers` layers.

        Raises:
            InputError: Nothing would be left to share.
        """
        own = self.own or sum(sizes[-self.layers :])
        if own >= sum(sizes):
            kept = f"own={self.own}" if self.own else f"layers={self.layers}"
            raise InputError(
                f"{kept} leaves nothing to share in a model of {len(sizes)} layers with "
                f"{sum(sizes)} numbers; keep fewer, or use a model with more layers (mlp)"
            )
        return replace(self, own=own)

    def server_init(self, x: Tensor) -> State:
        """The base of the initial model, [trials, d - own]."""
        base, _ = self._parts(x)
        return State(base.contiguous(), x.new_zeros(x.shape[0], 1).double())

    def client_init(self, x: Tensor) -> Tensor:
        """The head of the initial model, [trials, own]: all clients start alike."""
        _, head = self._parts(x)
        return head.contiguous()

    def model(self, server: State, own: Tensor) -> Tensor:
        """Every client's whole model, [clients, trials, d]: the base, then its own head."""
        base = server.x.expand(*own.shape[:-1], -1)
        return torch.cat((base, own), -1)

    def client(self, f: Objective, x: Tensor, own: Tensor, local: Local) -> Reply:
        """Local SGD on base and head together; sends the base's change, keeps the head."""
        start = torch.cat((solver.at_clients(x, local), own), -1)
        delta, loss = solver.sgd(f, start, local, at(self.alpha, local.k))
        base, head = self._parts(delta)
        return Reply(base, own + head, loss)

    def server(self, server: State, delta: Tensor, cohort: Cohort) -> State:
        """The bases are averaged as in FedAvg."""
        g = norm(delta) / (at(self.alpha, cohort.k) * cohort.steps)
        return State(server.x + delta, g)

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return {"grad_norm": server.grad_norm[:, 0]}

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """Base and head of flat vectors [..., d]."""
        shared = x.shape[-1] - self.own
        return x.tensor_split((shared,), -1)
