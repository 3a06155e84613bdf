"""FedSGD. The baseline of McMahan et al., "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017.

    x      global model x_k
    g      gradient of a client at x_k
    alpha  client step
    eta    server step, 1: the plain average of the clients' steps

Every client sends one mini-batch gradient in each round, and the server averages these: FedAvg
with a single local step.

With all clients and batches of all their rows it is gradient descent on f with step eta alpha,
which diverges from a step of 2/L on. It takes one gradient of a client in a round whatever
`local_steps` says, so it needs many rounds.
"""

from __future__ import annotations

from typing import NamedTuple

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


class State(NamedTuple):
    """Server state."""

    x: Tensor  # [trials, d]
    grad_norm: Tensor  # [trials, 1]


@hyper
class FedSGD(Algorithm):
    """Distributed SGD.

    >>> FedSGD(alpha=0.1).alpha
    0.1
    """

    alpha: Step = param(default=0.01, doc="client step size α")
    eta: Step = param(default=1.0, doc="server step size η; 1 is plain averaging")

    def __post_init__(self) -> None:
        positive(self, "alpha", "eta")

    def local_steps(self, tau: Tensor) -> Tensor:
        """One mini-batch for each client, whatever tau the user asks for."""
        return torch.ones_like(tau)

    def server_init(self, x: Tensor) -> State:
        return State(x, x.new_zeros(x.shape[0], 1).double())

    def client(self, f: Objective, x: Tensor, own: tuple[()], local: Local) -> Reply:
        """Sends the mini-batch gradient g = grad f_i(x; batch) [M, trials, d]."""
        start = x.expand(local.own_steps.shape[0], *x.shape)
        loss, g = f.value_and_grad(start, local.batch(0))
        return Reply(g, own, loss)

    def server(self, server: State, g: Tensor, cohort: Cohort) -> State:
        """x_{k+1} = x_k - eta alpha * sum w_i g_i."""
        x = server.x - at(self.eta, cohort.k) * at(self.alpha, cohort.k) * g
        return State(x, norm(g))

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return {"grad_norm": server.grad_norm[:, 0]}
