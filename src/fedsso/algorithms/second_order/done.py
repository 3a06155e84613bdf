"""DONE. Dinh et al., "DONE: Distributed Approximate Newton-type Method for Federated Edge
Learning", IEEE Transactions on Parallel and Distributed Systems 2022, arXiv 2012.05625.

    x      global model w
    g      mean of the clients' full gradients at x
    d      direction of a client
    alpha  step of Richardson's iteration
    R      its length
    eta    server step

The first exchange collects the gradient. In the second each client runs R steps of Richardson's
iteration from d = 0:

    d  <-  (I - alpha H_i) d - alpha g

This tends to -H_i^-1 g, and the server moves along the mean. R = 1 is gradient descent with step
alpha eta; a finite R damps directions without curvature. It needs alpha < 2 / (largest eigenvalue
of any H_i), and diverges where an H_i is indefinite.

x travels once, so that a client receives 2 d numbers and sends 2 d. R steps take R - 1 products
with the Hessian, each over all rows of the client.
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
    Phase,
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


class State(NamedTuple):
    """Server state, and the message of the second exchange."""

    x: Tensor  # [trials, d]
    g: Tensor  # [trials, d]


@hyper
class DONE(Algorithm):
    """Mean of the clients' Newton directions, computed by Richardson's iteration.

    >>> DONE(alpha=0.05).R
    20
    """

    alpha: Step = param(default=0.1, doc="step size α of Richardson's iteration")
    eta: Step = param(default=1.0, doc="server step size η")
    R: int = param(default=20, doc="number R of Richardson iterations")

    def __post_init__(self) -> None:
        positive(self, "alpha", "eta")
        at_least(self, "R", 1)

    def asks(self) -> str:
        return "hvp"

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Gradient, then direction; neither has SGD steps."""
        return (
            Phase(self.broadcast, self.gradient, self.collect),
            Phase(lambda server: server, self.client, self.server),
        )

    def server_init(self, x: Tensor) -> State:
        return State(x, torch.zeros_like(x))

    def gradient(self, f: Objective, x: Tensor, own: tuple[()], local: Local) -> Reply:
        """First exchange: the client's full gradient at x."""
        loss, g = solver.gradient(f, x, local)
        return Reply(g, own, loss)

    def collect(self, server: State, g: Tensor, _: Cohort) -> State:
        """g = sum w_i g_i."""
        return State(server.x, g)

    def client(self, f: Objective, message: State, own: tuple[()], local: Local) -> Reply:
        """Second exchange: d_R of Richardson's iteration for H_i d = -g.

        d_R = -alpha * sum over j < R of (I - alpha H_i)^j g.
        """
        x, g = message
        alpha = at(self.alpha, local.k)
        H = solver.curvature(f, x, local)
        d = solver.at_clients(-alpha * g, local)  # the first step from d = 0
        for _ in range(self.R - 1):
            d = d - alpha * (H(d) + g)
        return Reply(d, own)

    def server(self, server: State, d: Tensor, cohort: Cohort) -> State:
        """x + eta * sum w_i d_i."""
        return State(server.x + at(self.eta, cohort.k) * d, server.g)

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return {"grad_norm": norm(server.g)[:, 0]}
