"""DANE. Shamir, Srebro, Zhang, "Communication-Efficient Distributed Optimization using an
Approximate Newton-type Method", ICML 2014.

    x      global model w
    g      mean of the clients' full gradients at x
    delta  w_i - x, update of client i
    eta    weight of the global gradient
    mu     proximal strength

The first exchange collects the clients' gradients. In the second each client minimises

    f_i(y) - <grad f_i(x) - eta g, y> + mu/2 |y - x|^2

exactly, by Newton's method, and the server averages. On quadratics that is a step with the mean of
the inverses of A_i + mu I. It works where clients are alike. Where their Hessians differ more than
mu allows, it diverges.

Gradient and model go each way once: x and g down, g_i and w_i up. All rows are used, and there
are no local SGD steps. mu = 0 is the paper's first choice, mu of three times the l2 penalty its
robust one.
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
    Phase,
    Reply,
    Scalar,
    Step,
    at,
    at_least,
    hyper,
    norm,
    not_negative,
    param,
    positive,
)
from ...algorithm import local as solver


class State(NamedTuple):
    """Server state, and the message of the second exchange."""

    x: Tensor  # [trials, d]
    g: Tensor  # [trials, d]


@hyper
class DANE(Algorithm):
    """Average of exact minimisers of objectives corrected by the global gradient.

    >>> DANE(mu=0.5).eta
    1.0
    """

    needs_all: ClassVar[str] = "feddane"

    eta: Step = param(default=1.0, doc="weight η of the global gradient")
    mu: Scalar = param(
        default=0.3, doc="proximal strength μ; 0 is the original, for clients with similar Hessians"
    )
    newton_steps: int = param(default=5, doc="Newton steps of a client")
    cg_steps: int = param(default=50, doc="conjugate-gradient steps per Newton step")
    tol: float = param(default=1e-4, doc="relative residual at which conjugate gradients stop")

    def __post_init__(self) -> None:
        positive(self, "eta")
        not_negative(self, "mu", "tol")
        at_least(self, "newton_steps", 1)
        at_least(self, "cg_steps", 1)

    def asks(self) -> str:
        return "hvp"

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Gradients, then minimisers; in the second exchange clients know x already."""
        return (
            Phase(self.broadcast, self.gradient, self.collect),
            Phase(lambda server: server, self.client, self.server),
        )

    def server_init(self, x: Tensor) -> State:
        return State(x, torch.zeros_like(x))

    def gradient(self, f: Objective, x: Tensor, own: tuple[()], local: Local) -> Reply:
        """First exchange: the client's full gradient g_i at x."""
        _, g = solver.gradient(f, x, local)
        return Reply(g, own)

    def collect(self, server: State, g: Tensor, _: Cohort) -> State:
        """g = sum p_i g_i."""
        return State(server.x, g)

    def client(self, f: Objective, message: State, own: tuple[()], local: Local) -> Reply:
        """Second exchange: w_i - x, by Newton's method on the tilted objective.

        The tilt eta g - g_i replaces the client's own gradient at x by eta g. The client computes
        g_i again instead of keeping it.
        """
        x, g = message
        loss, g_i = solver.gradient(f, x, local)
        precision = solver.Solver(self.newton_steps, self.cg_steps, self.tol)
        tilt = at(self.eta, local.k) * g - g_i
        delta = solver.newton(f, x, local, precision, tilt, self.mu)
        return Reply(delta, own, loss)

    def server(self, server: State, delta: Tensor, _: Cohort) -> State:
        """The mean of the clients' minimisers."""
        return State(server.x + delta, server.g)

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return {"grad_norm": norm(server.g)[:, 0]}
