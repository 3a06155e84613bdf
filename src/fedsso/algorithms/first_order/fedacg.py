"""FedACG. Kim, Kim and Han, "Communication-Efficient Federated Learning with Accelerated Client
Gradient", CVPR 2024.

    x      global model theta
    m      momentum of the updates, first 0
    start  x + beta m, where the clients start
    delta  mean of the clients' updates y - start
    alpha  client step
    beta   weight of the past in m, lambda in the paper
    mu     strength of the proximal term mu/2 |y - start|^2, beta in the paper

FedAvgM adds its momentum after the clients have answered. Here the server adds it before: clients
start where the momentum would take the model, and correct that. The proximal term holds them near
this common start. The server then has

    m = beta m + delta        x = start + delta

which is x + m: the momentum of FedAvgM with server step 1, with gradients taken ahead. A constant
delta is multiplied by 1 / (1 - beta) in the long run, so a client step that suits FedAvg may be
too large here. The message is one vector, as with FedAvg: clients need not know x and m apart.

The defaults have the numbers of the authors' code, beta = 0.85 and mu = 0.001. That code has no
1/2 in the proximal term: mu = 0.002 here is the same as its 0.001.
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
    Scalar,
    Step,
    at,
    hyper,
    norm,
    not_negative,
    param,
    positive,
    share,
)
from ...algorithm import local as solver


class State(NamedTuple):
    """Server state."""

    x: Tensor  # [trials, d]
    m: Tensor  # [trials, d]
    grad_norm: Tensor  # [trials, 1] length of delta / (alpha tau)


@hyper
class FedACG(Algorithm):
    """Federated averaging with clients that start from the server's momentum, and a proximal term.

    >>> FedACG(alpha=0.1, mu=0).beta
    0.85
    """

    alpha: Step = param(default=0.01, doc="client step size α")
    beta: Scalar = param(default=0.85, doc="momentum β (the paper's λ); 0 is FedProx")
    mu: Scalar = param(default=1e-3, doc="proximal strength μ (the paper's β); 0: none")

    def __post_init__(self) -> None:
        positive(self, "alpha")
        share(self, "beta")
        not_negative(self, "mu")

    def server_init(self, x: Tensor) -> State:
        nothing = x.new_zeros(x.shape[0], 1).double()
        return State(x, torch.zeros_like(x), nothing)

    def broadcast(self, server: State) -> Tensor:
        """The clients' start x + beta m [trials, d]."""
        return server.x + self.beta * server.m

    def client(self, f: Objective, start: Tensor, own: tuple[()], local: Local) -> Reply:
        """Local SGD on f_i(y) + mu/2 |y - start|^2; sends y - start.

        The gradient of the proximal term is mu times the update so far.
        """
        alpha = at(self.alpha, local.k)
        delta, loss = solver.sgd(f, start, local, alpha, lambda delta: self.mu * delta)
        return Reply(delta, own, loss)

    def server(self, server: State, delta: Tensor, cohort: Cohort) -> State:
        """m = beta m + delta, and x is the mean of the clients' models."""
        x = self.broadcast(server) + delta
        m = self.beta * server.m + delta
        g = norm(delta) / (at(self.alpha, cohort.k) * cohort.steps)
        return State(x, m, g)

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return {"grad_norm": server.grad_norm[:, 0]}
