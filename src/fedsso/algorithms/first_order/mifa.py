"""MIFA. Gu, Huang, Zhang and Huang, "Fast Federated Learning in the Presence of Arbitrary Device
Unavailability", NeurIPS 2021.

    x      global model w_t
    Delta  x_{k,tau} - x_k of a client
    y_i    Delta_i / alpha of the last answer of client i, first 0; -G^i in the paper
    y      sum p_i y_i over all clients
    S      who answers
    p_i    the clients' weights, m = sum of the p_i of S, w_i = p_i / m
    alpha  client step, eta_t in the paper
    eta    server step, 1 in the paper

Clients are FedAvg's. The server averages over all clients in every round, with the last update of
those who are absent. What it remembers are gradients, so the client step of this round applies to
all of them:

    y_i = Delta_i / alpha for the clients of S
    y   = y + m sum_S w_i (Delta_i / alpha - y_i)        x = x + eta alpha y

That is SAG. What changes at a client counts with its own weight p_i. In FedVARP it counts with
w_i, which is larger. So in MIFA the choice of clients adds little noise, whoever is absent and for
whatever reason. But its steps follow old gradients, and must be smaller than FedVARP's. With all
clients in every round it is FedAvg.

The paper lets every client answer in round 1. Here a client that has not answered yet counts with
0: first steps are shorter, and lean to those who have answered, until everybody has. To wait for
all of them would keep the model where it is for many rounds, and for ever if one never answers. A
client that has not answered for long is forgotten: its y_i leaves y, and is 0 again.

The paper's alpha falls like 1/t: give a schedule for it. The server keeps d numbers for each
client. Bytes on the wire are FedAvg's.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

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
    hyper,
    norm,
    param,
    positive,
)
from ...algorithm import local as solver


class State(NamedTuple):
    """Server state, beside the y_i of the clients, which the engine keeps."""

    x: Tensor  # [trials, d]
    y: Tensor  # [trials, d]
    grad_norm: Tensor  # [trials, 1] length of y / tau


class News(NamedTuple):
    """What is averaged over the clients of S instead of their updates."""

    change: Tensor  # Delta_i / alpha - y_i


@hyper
class MIFA(Algorithm):
    """Federated averaging over all clients, using the last update of absent ones.

    >>> MIFA(alpha=0.03).eta
    1.0
    """

    any_client: ClassVar[bool] = True

    alpha: Step = param(default=0.01, doc="client step size α (the paper's η_t)")
    eta: Step = param(default=1.0, doc="server step size η; 1 in the paper")

    def __post_init__(self) -> None:
        positive(self, "alpha", "eta")

    def server_init(self, x: Tensor) -> State:
        return State(x, torch.zeros_like(x), x.new_zeros(x.shape[0], 1).double())

    def memory_init(self, x: Tensor) -> Tensor:
        """y_i = 0."""
        return torch.zeros_like(x)

    def client(self, f: Objective, x: Tensor, own: tuple[()], local: Local) -> Reply:
        """Local SGD as in FedAvg."""
        delta, loss = solver.sgd(f, x, local, at(self.alpha, local.k))
        return Reply(delta, own, loss)

    def receive(
        self,
        server: State,  # noqa: ARG002
        delta: Tensor,
        y: Tensor,
        k: int,
    ) -> tuple[News, Tensor]:
        """The changes Delta_i / alpha - y_i are averaged, and Delta_i / alpha is remembered."""
        new = delta / at(self.alpha, k)
        return News(new - y), new

    def server(self, server: State, news: News, cohort: Cohort) -> State:
        """x_{k+1} = x_k + eta alpha y, where y is the mean of all clients' last updates."""
        y = server.y + cohort.mass * news.change
        x = server.x + at(self.eta, cohort.k) * at(self.alpha, cohort.k) * y
        return State(x, y, norm(y) / cohort.steps)

    def forget(self, server: State, lost: Tensor) -> State:
        """y without the y_i of clients that stay away."""
        return server._replace(y=server.y - lost)

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return {"grad_norm": server.grad_norm[:, 0]}
