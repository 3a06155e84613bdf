"""FedDANE. Li et al., "FedDANE: A Federated Newton-Type Method", Asilomar 2019, arXiv 2001.01920.

    x      global model
    g      mean of the clients' full gradients at x
    delta  y_i - x, update of client i
    alpha  client step
    mu     proximal strength
    tau    local steps

There are two exchanges with two samples of clients. The first collects g, in the second clients
minimise

    f_i(y) + <g - grad f_i(x), y - x> + mu/2 |y - x|^2

by tau SGD steps or by Newton's method (solver="exact"), and the server averages. With small samples
g - grad f_i(x) is mostly noise. Then, and on non-convex models, it diverges unless mu is large or
alpha small.

With solver="exact" and the same clients in both exchanges it is DANE with eta = 1. A client of
the second exchange that was not in the first has to be sent x as well, and computes its gradient
at x itself.
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
    Step,
    at,
    at_least,
    hyper,
    none,
    norm,
    not_negative,
    param,
    positive,
)
from ...algorithm import local as solver
from ...errors import one_of


class State(NamedTuple):
    """Server state, and the message of the second exchange."""

    x: Tensor  # [trials, d]
    g: Tensor  # [trials, d]


@hyper
class FedDANE(Algorithm):
    """Local SGD on objectives corrected by the global gradient, with a proximal term.

    >>> FedDANE(mu=0.1, solver="exact").newton_steps
    5
    """

    alpha: Step = param(default=0.01, doc="client step size α of solver sgd")
    mu: Scalar = param(default=0.001, doc="proximal strength μ; larger (0.1, 1) if it diverges")
    solver: str = param(default="sgd", doc="sgd (τ local steps) or exact (Newton's method)")
    newton_steps: int = param(default=5, doc="Newton steps of solver exact")
    cg_steps: int = param(default=50, doc="conjugate-gradient steps per Newton step")
    tol: float = param(default=1e-4, doc="relative residual at which conjugate gradients stop")

    def __post_init__(self) -> None:
        positive(self, "alpha")
        not_negative(self, "mu", "tol")
        one_of("solver", self.solver, ("sgd", "exact"))
        at_least(self, "newton_steps", 1)
        at_least(self, "cg_steps", 1)

    def asks(self) -> str:
        return "hvp" if self.solver == "exact" else ""

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Gradients of one sample of clients, then updates of a new one.

        `fresh` draws the second sample; with full participation both are all clients.
        """
        steps = none if self.solver == "exact" else self.local_steps
        return (
            Phase(self.broadcast, self.gradient, self.collect),
            Phase(lambda server: server, self.client, self.server, steps, fresh=True),
        )

    def server_init(self, x: Tensor) -> State:
        return State(x, torch.zeros_like(x))

    def gradient(self, f: Objective, x: Tensor, own: tuple[()], local: Local) -> Reply:
        """First exchange: the client's full gradient at x."""
        _, g = solver.gradient(f, x, local)
        return Reply(g, own)

    def collect(self, server: State, g: Tensor, _: Cohort) -> State:
        """g = sum w_i g_i over the first sample."""
        return State(server.x, g)

    def client(self, f: Objective, message: State, own: tuple[()], local: Local) -> Reply:
        """Second exchange: y_i - x for the tilted objective.

        By SGD a step is y <- y - alpha (grad f_i(y; batch) + g - g_i + mu (y - x)).
        """
        x, g = message
        loss, g_i = solver.gradient(f, x, local)  # of a sample that may not be the first one
        tilt = g - g_i
        if self.solver == "exact":
            precision = solver.Solver(self.newton_steps, self.cg_steps, self.tol)
            return Reply(solver.newton(f, x, local, precision, tilt, self.mu), own, loss)
        alpha = at(self.alpha, local.k)
        delta, loss = solver.sgd(f, x, local, alpha, lambda delta: tilt + self.mu * delta)
        return Reply(delta, own, loss)

    def server(self, server: State, delta: Tensor, _: Cohort) -> State:
        """The mean of the second sample's models."""
        return State(server.x + delta, server.g)

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return {"grad_norm": norm(server.g)[:, 0]}
