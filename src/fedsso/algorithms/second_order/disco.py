"""DiSCO. Zhang and Xiao, "DiSCO: Distributed Optimization for Self-Concordant Empirical Loss",
ICML 2015.

    x      global model w_k
    g      gradient of f at x
    H      Hessian of f at x, the mean of the clients' H_i
    v      solution of H v = g so far
    r      residual g - H v
    u, y   direction of the conjugate gradients, and H u
    s      preconditioned residual P^-1 r
    beta   relative residual at which they end
    delta  Newton decrement sqrt(v^T H v)
    mu     damping of the preconditioner
    S, Y   pairs (u, H u) of earlier exchanges (precondition="bfgs")

A round is one inexact Newton step. The first exchange collects the gradient. Each of the next
`products` exchanges sends a direction u, collects H_i u, and is one step of preconditioned
conjugate gradients. Then x moves by -v / (1 + delta): a damped step, which becomes a whole one as
delta vanishes. The preconditioner is

    lead   P = H_1 + mu I of the first client, as in the paper. That client solves P s = r by
           conjugate gradients of its own: an exchange with it alone before each product.
    bfgs   ours, without a lead: P = B, the BFGS matrix that starts from mu I and takes every pair
           (u, H u), those of earlier rounds too. They are exact curvature and cost no bytes. With
           pairs of the same Hessian B^-1 r is the direction of the conjugate gradients itself.
    none   P = I.

A new direction is made conjugate to the last one: u = s - (s^T y / u^T y) u. That is the formula
of Polak and Ribiere, which bears a P^-1 that is not quite the same in every step.

The number of exchanges is fixed. A system that is solved earlier sends u = 0: that costs bytes all
the same, and the column `products` of the trace tells how many exchanges were of use. Where
u^T H u <= 0 they end with the v before; in the first product, with v = u.

With t products a client receives and sends (1 + t) d numbers, the lead t d more. Clients keep
nothing. It is for convex models. The cohort of a round stays the same in all its exchanges, so that
some clients may be absent; the step is then Newton's for those who answered.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import solve_triangular

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
    positive,
)
from ...algorithm import local as solver
from ...errors import one_of

PRECONDITIONERS = ("lead", "bfgs", "none")
Vectors = tuple[Tensor, Tensor]
"""x, and r or u."""


class State(NamedTuple):
    """Server state. All but x, S and Y belongs to the Newton step under way."""

    x: Tensor  # [trials, d]
    g: Tensor  # [trials, d]
    r: Tensor  # [trials, d]
    v: Tensor  # [trials, d]
    u: Tensor  # [trials, d]
    y: Tensor  # [trials, d]
    going: Tensor  # [trials, 1] of booleans: the system is not solved yet
    square: Tensor  # [trials, 1], v^T H v
    products: Tensor  # [trials, 1], products of use in this round
    S: Tensor  # [trials, pairs, d], the oldest pair first; 0 where there is none
    Y: Tensor  # [trials, pairs, d]


@hyper
class DiSCO(Algorithm):
    """Damped Newton steps by preconditioned conjugate gradients over all clients.

    >>> DiSCO(precondition="bfgs").products
    5
    """

    precondition: str = param(default="lead", doc="lead, bfgs or none")
    products: int = param(default=5, doc="Hessian products per round, one exchange each")
    mu: Scalar = param(default=1e-3, doc="damping μ of the leader's Hessian; B starts from μ I")
    beta: Scalar = param(default=0.1, doc="relative residual β at which a system is solved")
    pairs: int = param(default=60, doc="number of stored pairs (bfgs)")
    cg_steps: int = param(default=100, doc="conjugate-gradient steps of the leading client")
    tol: float = param(default=1e-4, doc="relative residual at which conjugate gradients stop")

    def __post_init__(self) -> None:
        one_of("precondition", self.precondition, PRECONDITIONERS)
        positive(self, "mu", schedules=False)
        not_negative(self, "beta", "tol")
        for name in ("products", "pairs", "cg_steps"):
            at_least(self, name, 1)

    def asks(self) -> str:
        return "hvp"

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The gradient, then the products, each after the lead's solution where there is one.

        x travels once: later exchanges send r to the lead, and u to all.
        """
        lead = Phase(lambda server: (server.x, server.r), self.solve, aim, lead=True)
        product = Phase(lambda server: (server.x, server.u), self.client, self.advance)
        last = product._replace(server=self.server)
        before = [lead] if self.precondition == "lead" else []
        others = (self.products - 1) * [*before, product]
        return (Phase(self.broadcast, self.gradient, self.collect), *others, *before, last)

    def server_init(self, x: Tensor) -> State:
        """No gradient is known, and no pair."""
        return empty(x, self.pairs if self.precondition == "bfgs" else 0)

    def gradient(self, f: Objective, x: Tensor, own: tuple[()], local: Local) -> Reply:
        """First exchange: the client's full gradient at x."""
        loss, g = solver.gradient(f, x, local)
        return Reply(g, own, loss)

    def collect(self, server: State, g: Tensor, _: Cohort) -> State:
        """v = 0, so that r = g."""
        new = empty(server.x, 0)._replace(g=g, r=g, going=norm(g) > 0, S=server.S, Y=server.Y)
        return self._turn(new)

    def solve(self, f: Objective, message: Vectors, own: tuple[()], local: Local) -> Reply:
        """Of the lead alone: s = (H_1 + mu I)^-1 r by conjugate gradients."""
        x, r = message
        H = solver.curvature(f, x, local)
        b = solver.at_clients(r, local)
        s = solver.cg(lambda v: H(v) + self.mu * v, b, self.cg_steps, self.tol)
        return Reply(s, own)

    def client(self, f: Objective, message: Vectors, own: tuple[()], local: Local) -> Reply:
        """One product H_i u."""
        x, u = message
        H = solver.curvature(f, x, local)
        return Reply(H(solver.at_clients(u, local)), own)

    def advance(self, server: State, y: Tensor, _: Cohort) -> State:
        """One step of the conjugate gradients, with a = r^T u / u^T H u."""
        return self._turn(stepped(server, y, self.beta))

    def server(self, server: State, y: Tensor, cohort: Cohort) -> State:
        """The last product, and the step x - v / (1 + delta)."""
        new = self.advance(server, y, cohort)
        damping = 1 + new.square.sqrt()
        return new._replace(x=server.x - new.v / damping.to(new.v.dtype))

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return {
            "grad_norm": norm(server.g)[:, 0],
            "decrement": server.square.sqrt()[:, 0],
            "products": server.products[:, 0],
        }

    def _turn(self, server: State) -> State:
        """The next direction, where the server makes it by itself."""
        if self.precondition == "lead":
            return server
        if self.precondition == "none":
            return turned(server, server.r - conjugate(server, server.r))
        return turned(server, inverse(server.S, server.Y, server.r, self.mu))


def empty(x: Tensor, pairs: int) -> State:
    """The state before a Newton step, with room for so many pairs."""
    zero = torch.zeros_like(x)
    number = x.new_zeros(x.shape[0], 1).double()
    store = x.new_zeros(x.shape[0], pairs, x.shape[-1])
    return State(
        x=x,
        g=zero,
        r=zero,
        v=zero,
        u=zero,
        y=zero,
        going=number > 0,
        square=number,
        products=number,
        S=store,
        Y=store,
    )


def stepped(server: State, y: Tensor, beta: Scalar) -> State:
    """One step of the conjugate gradients along u, given y = H u; a = r^T u / u^T H u.

    The pair (u, y) takes the place of the oldest one.
    """
    u = server.u
    uy = dot(u, y)
    good = server.going & (uy > 0)
    flat = server.going & (uy <= 0) & (server.products == 0)
    a = torch.where(good, dot(server.r, u) / uy, 0 * uy).to(u.dtype)  # NaN stays NaN
    v = torch.where(flat, u, server.v + a * u)
    r = server.r - a * y
    square = torch.where(flat, -uy, dot(v, server.g - r).clamp(min=0))
    new = server._replace(
        r=r,
        v=v,
        y=y,
        going=good & (norm(r) > beta * norm(server.g)),
        square=torch.where(server.going, square, server.square),
        products=server.products + server.going,
    )
    if not server.S.shape[1]:  # no pairs are kept
        return new
    S = torch.cat((server.S[:, 1:], u.unsqueeze(1)), 1)
    Y = torch.cat((server.Y[:, 1:], y.unsqueeze(1)), 1)
    keep = good.unsqueeze(-1)
    return new._replace(S=torch.where(keep, S, server.S), Y=torch.where(keep, Y, server.Y))


def conjugate(server: State, s: Tensor) -> Tensor:
    """What makes s conjugate to the last direction when it is taken away: (s^T y / u^T y) u."""
    uy = dot(server.u, server.y)
    share = torch.where(uy > 0, dot(s, server.y) / uy, 0 * uy)
    return share.to(s.dtype) * server.u


def aim(server: State, s: Tensor, _: Cohort) -> State:
    """The next direction, from the lead's s."""
    return turned(server, s - conjugate(server, s))


def turned(server: State, u: Tensor) -> State:
    """The state with a new direction; 0 where the system is solved."""
    return server._replace(u=torch.where(server.going, u, 0 * u))


def inverse(S: Tensor, Y: Tensor, r: Tensor, mu: Scalar) -> Tensor:
    """B^-1 r [trials, d] of the BFGS matrix B that starts from mu I and has learnt all pairs.

    Args:
        S: The steps, [trials, pairs, d], the oldest first; rows of 0 are no pairs.
        Y: The changes of the gradient along them.
        r: [trials, d].
        mu: A number, or [trials, 1].

    It is the compact form of `maths/quasi_newton.py`, with R = triu(S Y^T) and D = diag(S Y^T):

        B^-1 = I/mu + S^T R^-T (D + Y Y^T/mu) R^-1 S - (S^T R^-T Y + Y^T R^-1 S)/mu

    A row of 0 has 1 on the diagonal of R, and drops out.
    """
    S = S.double()
    Y = Y.double()
    b = r.double().unsqueeze(-1)
    gamma = (1 / mu).double().unsqueeze(-1) if isinstance(mu, Tensor) else 1 / mu
    R = (S @ Y.mT).triu()
    D = R.diagonal(dim1=-2, dim2=-1)
    R = R + torch.diag_embed((D == 0).double())
    a = solve_triangular(R, S @ b, upper=True)
    top = solve_triangular(R.mT, D.unsqueeze(-1) * a + gamma * (Y @ (Y.mT @ a - b)), upper=False)
    found: Tensor = gamma * (b - Y.mT @ a) + S.mT @ top
    return found.squeeze(-1).to(r.dtype)
