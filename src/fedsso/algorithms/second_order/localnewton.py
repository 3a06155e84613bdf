"""LocalNewton. Gupta et al., "LocalNewton: Reducing Communication Bottleneck for Distributed
Learning", UAI 2021; with the global line search of Bischoff et al., "On Second-order Optimization
Methods for Federated Learning", 2021.

    x   global model
    p   mean of the clients' y_i - x
    mu  proximal strength, damps the Hessians
    t   step of the line search

Clients take a few Newton steps of their own from x on f_i + mu/2 |y - x|^2, by conjugate gradients
and Armijo's rule. The second exchange collects their losses at the ten steps 1, 1/2, ..., 2^-9
along the mean direction p, and their slopes g_i^T p. The server takes the largest step that lowers
f enough (Armijo, c = 0.1). Local gradients pull to local minima: unequal clients stop it short of
the minimiser of f.

A client receives x and p and sends its update and twelve numbers. All rows are used, and there
are no SGD steps. With one client, a quadratic f and mu = 0 it ends in one round.
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
    not_negative,
    param,
)
from ...algorithm import local as solver


class State(NamedTuple):
    """Server state, and the message of the second exchange."""

    x: Tensor  # [trials, d]
    p: Tensor  # [trials, d]


class Search(NamedTuple):
    """Upload of the second exchange."""

    losses: Tensor  # f_i(x + t p), [..., 10]
    f0: Tensor  # f_i(x), [..., 1]
    slope: Tensor  # p^T grad f_i(x), [..., 1]


@hyper
class LocalNewton(Algorithm):
    """Local Newton steps, averaged, with a global line search.

    >>> LocalNewton(mu=0).newton_steps
    1
    """

    newton_steps: int = param(default=1, doc="Newton steps L of a client")
    mu: Scalar = param(default=0.01, doc="proximal strength μ; 0 is the original")
    cg_steps: int = param(default=50, doc="conjugate-gradient steps per Newton step")
    tol: float = param(default=1e-4, doc="relative residual at which conjugate gradients stop")

    def __post_init__(self) -> None:
        not_negative(self, "mu", "tol")
        at_least(self, "newton_steps", 1)
        at_least(self, "cg_steps", 1)

    def asks(self) -> str:
        return "hvp"

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Local Newton steps, then the line search, whose losses are never compressed."""
        return (
            Phase(self.broadcast, self.client, self.aim),
            Phase(lambda server: server, self.search, self.server, exact=True),
        )

    def server_init(self, x: Tensor) -> State:
        return State(x, torch.zeros_like(x))

    def client(self, f: Objective, x: Tensor, own: tuple[()], local: Local) -> Reply:
        """First exchange: y_i - x after `newton_steps` steps on f_i + mu/2 |y - x|^2."""
        precision = solver.Solver(self.newton_steps, self.cg_steps, self.tol)
        return Reply(solver.newton(f, x, local, precision, None, self.mu), own)

    def aim(self, server: State, p: Tensor, _: Cohort) -> State:
        """p = sum w_i (y_i - x)."""
        return State(server.x, p)

    def search(self, f: Objective, message: State, own: tuple[()], local: Local) -> Reply:
        """Second exchange: f_i at the ten steps along p, f_i(x), and its slope along p."""
        x, p = message
        loss, g = solver.gradient(f, x, local)
        slope = dot(g, solver.at_clients(p, local)).to(x.dtype)
        losses = solver.along(f, x, p, local)
        return Reply(Search(losses, loss.unsqueeze(-1), slope), own, loss)

    def server(self, server: State, mean: Search, _: Cohort) -> State:
        """x + t p; t = 0, and so no step, where no t lowers f."""
        x, p = server
        t = solver.armijo(mean.losses, mean.f0, mean.slope, 0.1)
        return State(x + t.to(x.dtype) * p, p)
