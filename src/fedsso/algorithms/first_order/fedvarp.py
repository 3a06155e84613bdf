"""FedVARP. Jhunjhunwala, Sharma, Nagarkatti and Joshi, "FedVARP: Tackling the Variance Due to
Partial Client Participation in Federated Learning", UAI 2022.

    x      global model w^(t)
    Delta  x_{k,tau} - x_k of a client; the paper's sign is the opposite
    y_i    the last update of client i that the server has seen, first 0
    y      sum p_i y_i over all clients
    v      estimate of the mean update of all clients
    S      who answers
    p_i    the clients' weights, m = sum of the p_i of S, w_i = p_i / m
    alpha  client step, eta_c in the paper
    eta    server step, eta_s in the paper

Clients are FedAvg's. Where only some answer, their mean differs from that of all, in every round
in another direction, and FedAvg ends in a ball around its fixed point. The server of FedVARP
remembers every client's last update. From those who answer it takes only what has changed:

    v = y + sum_S w_i (Delta_i - y_i)        x = x + eta v
    y = y + m sum_S w_i (Delta_i - y_i)      y_i = Delta_i for the clients of S

Near a fixed point updates repeat, so these changes vanish, and with them the noise of the choice
of clients: that is SAGA's correction. With all clients in every round v is their mean, and this is
FedAvg.

A client that has not answered yet counts with 0. One that has not answered for long is forgotten:
its y_i leaves y, and is 0 again.

The server keeps d numbers for each client. Bytes on the wire are FedAvg's.
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
    grad_norm: Tensor  # [trials, 1] length of v / (alpha tau)


class News(NamedTuple):
    """What is averaged over the clients of S instead of their updates."""

    change: Tensor  # Delta_i - y_i


@hyper
class FedVARP(Algorithm):
    """Federated averaging that corrects for absent clients with their last updates.

    >>> FedVARP(alpha=0.03).eta
    1.0
    """

    any_client: ClassVar[bool] = True

    alpha: Step = param(default=0.01, doc="client step size α (the paper's η_c)")
    eta: Step = param(default=1.0, doc="server step size η (the paper's η_s)")

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
        k: int,  # noqa: ARG002
    ) -> tuple[News, Tensor]:
        """The changes Delta_i - y_i are averaged, and Delta_i is remembered."""
        return News(delta - y), delta

    def server(self, server: State, news: News, cohort: Cohort) -> State:
        """x_{k+1} = x_k + eta v, where v = y + sum_S w_i (Delta_i - y_i)."""
        v = server.y + news.change
        x = server.x + at(self.eta, cohort.k) * v
        y = server.y + cohort.mass * news.change
        return State(x, y, norm(v) / (at(self.alpha, cohort.k) * cohort.steps))

    def forget(self, server: State, lost: Tensor) -> State:
        """y without the y_i of clients that stay away."""
        return server._replace(y=server.y - lost)

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return {"grad_norm": server.grad_norm[:, 0]}
