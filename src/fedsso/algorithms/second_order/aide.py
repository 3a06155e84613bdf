"""AIDE. Reddi, Konecny, Richtarik, Poczos and Smola, "AIDE: Fast and Communication Efficient
Distributed Optimization", arXiv 1608.06879.

    x     global model w^(k)
    y     extrapolated model, the centre of the proximal term
    z     point of the inner DANE steps, at first x
    g     gradient of f at z + tau (z - y), that of f + tau/2 |. - y|^2
    tau   proximal strength of the acceleration
    mu    proximal strength of DANE
    lam   strong convexity of f
    q     lam / (lam + tau)
    zeta  weight of the acceleration
    beta  its momentum

Catalyst, accelerated proximal points, around DANE. A round minimises f(w) + tau/2 |w - y|^2 by
`inner` steps of DANE. In each of them the clients' gradients are collected, and every client
minimises

    f_i(w) + <g - grad f_i(z), w - z> + (mu + tau)/2 |w - z|^2

by Newton's method: that is DANE's client with another gradient and a stronger proximal term, so
that y need not be sent. The server averages the minimisers, and extrapolates:

    zeta'^2 = (1 - zeta') zeta^2 + q zeta'       beta = zeta (1 - zeta) / (zeta^2 + zeta')
    y' = x' + beta (x' - x)

With zeta = sqrt(q) at first, beta is (1 - sqrt(q)) / (1 + sqrt(q)) in every round; the authors'
code begins with other values, and comes to the same limit.

The proximal term makes the clients' Hessians alike: tau of the size of their dissimilarity, the
largest |A_i - H|, is right, and mu may be 0. So AIDE converges where DANE with mu = 0 does not.
Where a good mu is known, DANE may be as fast.

For each inner step the model and a gradient go each way once, as in DANE. The clients keep nothing.
The authors take one inner step. tau = 0 is DANE.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from ...algorithm import (
    Algorithm,
    Attendance,
    Cohort,
    Local,
    Objective,
    Phase,
    Reply,
    Scalar,
    at_least,
    hyper,
    norm,
    not_negative,
    param,
)
from ...algorithm import local as solver
from ...errors import InputError

GUESS = 0.01  # q where f is not known to be strongly convex


class State(NamedTuple):
    """Server state."""

    x: Tensor  # [trials, d]
    y: Tensor  # [trials, d]
    z: Tensor  # [trials, d]
    g: Tensor  # [trials, d]
    zeta: Tensor  # [trials, 1]
    grad_norm: Tensor  # [trials, 1] of f itself, at the last z


def momentum(zeta: Tensor, q: Scalar) -> tuple[Tensor, Tensor]:
    """The next zeta, the positive root of z^2 + (zeta^2 - q) z - zeta^2, and beta."""
    half = (zeta.square() - q) / 2
    new = (half.square() + zeta.square()).sqrt() - half
    return new, zeta * (1 - zeta) / (zeta.square() + new)


@hyper
class AIDE(Algorithm):
    """Accelerated DANE, with proximal terms centred at extrapolated models.

    >>> AIDE(tau=0.03).mu
    0.0
    """

    needs_all: ClassVar[str] = "feddane"

    tau: Scalar = param(
        default=0.1, doc="proximal strength τ: how much the clients' Hessians differ"
    )
    mu: Scalar = param(default=0.0, doc="proximal strength μ of DANE")
    q: Scalar = param(default=0.0, doc="q = λ/(λ + τ); 0: with λ = l2, or 0.01 without l2")
    zeta: Scalar = param(default=0.0, doc="initial ζ; 0: √q, which keeps β constant")
    inner: int = param(default=1, doc="DANE steps per round")
    newton_steps: int = param(default=5, doc="Newton steps of a client")
    cg_steps: int = param(default=50, doc="conjugate-gradient steps per Newton step")
    tol: float = param(default=1e-4, doc="relative residual at which conjugate gradients stop")

    def __post_init__(self) -> None:
        not_negative(self, "tau", "mu", "q", "zeta", "tol")
        for name in ("q", "zeta"):
            value = getattr(self, name)
            if value > 1:
                raise InputError(
                    f"{name} must be in [0, 1], got {name}={value:g}; leave it out for the default"
                )
        for name in ("inner", "newton_steps", "cg_steps"):
            at_least(self, name, 1)

    def asks(self) -> str:
        return "hvp"

    def join(self, attendance: Attendance, d: int) -> Self:  # noqa: ARG002
        """The record with q filled in, by the penalty that makes f strongly convex."""
        if self.q:
            return self
        lam = attendance.l2
        return replace(self, q=lam / (lam + self.tau) if lam else GUESS)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Gradients, then minimisers, in every inner step; clients know z then already."""
        gradient = Phase(lambda server: server.z, self.gradient, self.collect)
        minimise = Phase(lambda server: (server.z, server.g), self.client, self.move)
        inner = (self.inner - 1) * (gradient, minimise)
        return (*inner, gradient, minimise._replace(server=self.server))

    def server_init(self, x: Tensor) -> State:
        number = x.new_zeros(x.shape[0], 1).double()
        root = torch.as_tensor(self.q).sqrt()
        given = torch.as_tensor(self.zeta)
        zeta = number + torch.where(given > 0, given, root).to(x.device)
        return State(x, x, x, torch.zeros_like(x), zeta, number)

    def gradient(self, f: Objective, z: Tensor, own: tuple[()], local: Local) -> Reply:
        """The client's full gradient at z."""
        _, g = solver.gradient(f, z, local)
        return Reply(g, own)

    def collect(self, server: State, g: Tensor, _: Cohort) -> State:
        """g = sum p_i g_i + tau (z - y)."""
        pulled = g + self.tau * (server.z - server.y)
        return server._replace(g=pulled, grad_norm=norm(g))

    def client(
        self, f: Objective, message: tuple[Tensor, Tensor], own: tuple[()], local: Local
    ) -> Reply:
        """w_i - z, by Newton's method. The client computes g_i again instead of keeping it."""
        z, g = message
        loss, g_i = solver.gradient(f, z, local)
        precision = solver.Solver(self.newton_steps, self.cg_steps, self.tol)
        delta = solver.newton(f, z, local, precision, g - g_i, self.mu + self.tau)
        return Reply(delta, own, loss)

    def move(self, server: State, delta: Tensor, _: Cohort) -> State:
        """The mean of the clients' minimisers."""
        return server._replace(z=server.z + delta)

    def server(self, server: State, delta: Tensor, cohort: Cohort) -> State:
        """The last inner step, and the extrapolation y = w + beta (w - x)."""
        w = self.move(server, delta, cohort).z
        zeta, beta = momentum(server.zeta, self.q)
        y = w + beta.to(w.dtype) * (w - server.x)
        return server._replace(x=w, y=y, z=w, zeta=zeta)

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return {"grad_norm": server.grad_norm[:, 0]}
