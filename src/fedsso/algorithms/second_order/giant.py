"""GIANT. Wang et al., "GIANT: Globally Improved Approximate Newton Method for Distributed
Optimization", NeurIPS 2018.

    x   global model w
    g   mean of the clients' full gradients at x
    p   mean of -(H_i + mu I)^-1 g
    mu  damping of the clients' Hessians
    t   step of the line search
    f0  f(x)

There are three exchanges. The first collects the gradient. In the second each client solves for its
Newton direction, by conjugate gradients. The third collects the losses at the ten steps 1, 1/2,
..., 2^-9 along the mean direction, of which the server takes the largest that lowers f enough
(Armijo, c = 0.1).

The mean of inverses stands for the inverse of the mean: that is good while the clients' Hessians
are alike. Where a client lacks a class its Hessian is singular, and only mu holds the direction
back.

x travels once: the second exchange sends g, the third p. So a client receives 3 d numbers and
sends 2 d + 11. No exchange has local steps: all are over all rows of the clients. On quadratics a
round with t = 1 is x - sum p_i (A_i + mu I)^-1 g.
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
    Scalar,
    at_least,
    dot,
    hyper,
    norm,
    not_negative,
    param,
)
from ...algorithm import local as solver


class State(NamedTuple):
    """Server state."""

    x: Tensor  # [trials, d]
    g: Tensor  # [trials, d]
    p: Tensor  # [trials, d]
    f0: Tensor  # [trials, 1]
    t: Tensor  # [trials, 1] last step of the line search


class Start(NamedTuple):
    """Upload of the first exchange."""

    g: Tensor
    f0: Tensor


@hyper
class GIANT(Algorithm):
    """Mean of the clients' Newton directions, with a line search.

    >>> GIANT(mu=0).cg_steps
    50
    """

    mu: Scalar = param(default=0.01, doc="damping μ of the clients' Hessians; 0 is the original")
    cg_steps: int = param(default=50, doc="conjugate-gradient steps of a client")
    tol: float = param(default=1e-4, doc="relative residual at which conjugate gradients stop")

    def __post_init__(self) -> None:
        not_negative(self, "mu", "tol")
        at_least(self, "cg_steps", 1)

    def asks(self) -> str:
        return "hvp"

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Gradient, direction, line search.

        The losses of the third exchange are exact: compressed ones could not be compared.
        """
        return (
            Phase(self.broadcast, self.gradient, self.collect),
            Phase(lambda server: (server.x, server.g), self.client, self.aim),
            Phase(lambda server: (server.x, server.p), self.search, self.server, exact=True),
        )

    def server_init(self, x: Tensor) -> State:
        zero = torch.zeros_like(x)
        one = x.new_ones(x.shape[0], 1)
        return State(x, zero, zero, one, one.double())

    def gradient(self, f: Objective, x: Tensor, own: tuple[()], local: Local) -> Reply:
        """First exchange: f_i(x) and its full gradient."""
        loss, g = solver.gradient(f, x, local)
        return Reply(Start(g, loss.unsqueeze(-1)), own, loss)

    def collect(self, server: State, mean: Start, _: Cohort) -> State:
        """g = sum w_i g_i and f0 = f(x), over those who answered."""
        return server._replace(g=mean.g, f0=mean.f0)

    def client(
        self, f: Objective, message: tuple[Tensor, Tensor], own: tuple[()], local: Local
    ) -> Reply:
        """Second exchange: p_i = -(H_i + mu I)^-1 g by conjugate gradients."""
        x, g = message
        H = solver.curvature(f, x, local)
        b = solver.at_clients(-g, local)
        p = solver.cg(lambda v: H(v) + self.mu * v, b, self.cg_steps, self.tol)
        return Reply(p, own)

    def aim(self, server: State, p: Tensor, _: Cohort) -> State:
        """p = sum w_i p_i."""
        return server._replace(p=p)

    def search(
        self, f: Objective, message: tuple[Tensor, Tensor], own: tuple[()], local: Local
    ) -> Reply:
        """Third exchange: the client's losses at the ten steps along p."""
        x, p = message
        return Reply(solver.along(f, x, p, local), own)

    def server(self, server: State, losses: Tensor, _: Cohort) -> State:
        """x + t p, with the largest t that lowers f enough.

        Where the losses differ by rounding alone, the step of the round before is taken again.
        """
        x, g, p, f0, t = server
        t = solver.armijo(losses, f0, dot(g, p), 0.1, t)
        return server._replace(x=x + t.to(x.dtype) * p, t=t)

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return {"grad_norm": norm(server.g)[:, 0]}
