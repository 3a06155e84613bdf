"""Basis Learn, BL1, BL2 and BL3. Qian, Islamov, Safaryan, Richtárik, "Basis Matters: Better
Communication-Efficient Second Order Methods for Federated Learning", AISTATS 2022.

    x       global model; z in BL1, which clients know
    V_i     orthonormal basis of the rows of client i, d x r_i
    Gam_i   V_i^T Hessian_i V_i without the penalty, r_i x r_i
    L_i     what is learnt of Gam_i
    S_i     C(Gam_i - L_i), compressed
    c_i     V_i^T gradient_i without the penalty
    lam     strength of the penalty
    H       sum p_i V_i L_i V_i^T
    w       where gradients were last sent, gw the gradient there
    mu      lower bound of f's curvature
    gam_i   max |L_i|, or c if that is more (BL3)

FedNL in a basis of each client's own. The gradient and the Hessian of a linear model with one
output lie in the span of the client's rows, where r_i numbers and an r_i x r_i matrix are enough.
There Top-K loses little: what a standard basis spreads over d x d entries stands in a few of these.
V_i is sent once, in the client's first round; it shows the span of the rows, not the rows.

    BL1   z - [H + lam I]_mu^-1 g, with the H of the round before. In some rounds, by a coin that
          all toss together, nobody sends a gradient, and g = [H + lam I]_mu (z - w) + gw. The model
          may go down as the largest entries of its change.
    BL2   FedNL-PP in the basis, for clients that may be absent: the minimum of the sum of the
          clients' last quadratic models, with the matrices V_i L_i V_i^T + (lam + l_i) I
    BL3   writes Gam_i in a basis of positive semidefinite matrices, learns the coefficients, and
          takes a matrix above the Hessian by the largest ratio beta of true to learnt ones:
          beta A - C, with the coefficients L_i + 2 gam_i of A_i and 2 gam_i of C_i

BL1 with basis="standard" is FedNL's option 1. Where BL2's client sends no gradient, the server
computes the change of its model, for which it remembers the client's w_i. Messages are the same for
all clients here, so that BL2's own compressed message to each client is not offered. BL3 is
recalled, not read: it is built so that its matrix is above the Hessian. It needs all clients here,
since the maximum is over those who answer. All of them then have the same point, and the paper's
step becomes x - (beta A - C + lam I)^-1 g.

A client sends with Top-K: BL1 r_i + 2 K numbers, or 2 K without a gradient; BL2 d + 2 K + 1; BL3
r_i + 2 K + 2. In its first round it sends d r_i numbers for V_i and r_i (r_i + 1) / 2 for L_i. Most
of the bytes of a short run are these, and half of the others are places; the papers' figures count
neither. The server remembers V_i, with BL2 also w_i, which over Flower it cannot.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...algorithm import (
    Attendance,
    Cohort,
    Local,
    Objective,
    Phase,
    Reply,
    Scalar,
    Step,
    Tree,
    at,
    at_least,
    filled,
    hyper,
    norm,
    param,
    positive,
)
from ...algorithm import local as solver
from ...maths import symmetric
from ..hessians import (
    Base,
    Upload,
    back,
    check_share,
    clipped,
    coefficients,
    combined,
    learn,
    least_curvature,
    padded,
    product,
    raised,
    received,
    size,
    spread,
    square,
    times,
    tossed,
    view,
    whole,
    wide,
    within,
    zeros,
)

# ---- BL1 ----


class State(NamedTuple):
    """Server state of BL1; x is the paper's z."""

    x: Tensor  # [trials, d]
    H: Tensor  # [trials, d, d]
    w: Tensor  # [trials, d]
    gw: Tensor  # [trials, d]
    v: Tree  # the last change of x as it goes down: values and places [trials, K], or nothing


class Own(NamedTuple):
    """What a client of BL1 keeps; V and L are padded to d x d."""

    V: Tree
    L: Tensor
    z: Tree  # the model, if its changes go down


@hyper
class BL1(Base):
    """FedNL in the basis of each client's rows, with fewer gradients and a compressed broadcast.

    >>> BL1(compressor="topk:82").p
    1.0
    """

    needs_all: ClassVar[str] = "bl2"

    eta: Step = param(default=1.0, doc="server step size η; below 1 it damps the Newton step")
    compressor: str = param(default="topk:100", doc="of r x r matrices: none, rank:R or topk:K")
    basis: str = param(default="data", doc="data (basis of the client's rows) or standard")
    p: float = param(default=1.0, doc="probability that a round has gradients (of all clients)")
    down: int = param(default=0, doc="entries of the model change sent to clients; 0: all")
    mu: Scalar | None = param(
        default=None, doc="lower bound μ of the curvature; None: l2, or else 0.1"
    )
    a: Scalar = param(default=1.0, doc="Hessian learning rate α")
    lam: float = param(default=0.0, doc="strength λ of the l2 penalty; 0: that of the run")

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "eta")
        at_least(self, "down", 0)
        check_share(self)
        if self.mu is not None:
            positive(self, "mu", schedules=False)

    def join(self, attendance: Attendance, d: int) -> Self:
        """The record with penalty and mu filled in."""
        lam = self.lam or attendance.l2
        mu = least_curvature(self.mu, lam, 0.1)
        return filled(self, lam=lam, mu=mu, down=min(self.down, d))

    def server_init(self, x: Tensor) -> State:
        symmetric.check_size(x)
        v: Tree = ()
        if self.down:
            places = torch.zeros(len(x), self.down, dtype=torch.int32, device=x.device)
            v = (x.new_zeros(len(x), self.down), places)
        return State(x, zeros(x), x, torch.zeros_like(x), v)

    def client_init(self, x: Tensor) -> Own:
        return Own(self.room(x), zeros(x), x if self.down else ())

    def memory_init(self, x: Tensor) -> Tree:
        return self.room(x)

    def broadcast(self, server: State) -> Tree:
        return server.v if self.down else server.x

    def client(self, f: Objective, message: Any, own: Own, local: Local) -> Reply:
        """Learns L_i at z and sends S_i; by the coin also c_i, and V_i in the first round."""
        z = own.z + spread(message, own.z) if self.down else message
        first = local.k == 1
        loss, c, X, V = view(f, z, local, self.lam, self.known(own.V, first))
        L = within(own.L, X)
        S, L = learn(X - L, L, local, self.rule(first, X.shape[-1]))
        heads = tossed("gradient", local.k, self.p)
        kept = Own(padded(V), square(L, z.shape[-1]), z if self.down else ())
        return Reply(Upload(c if heads else (), S, V if first else ()), kept, loss)

    def receive(self, server: State, upload: Upload, V: Any, k: int) -> tuple[Tree, Tree]:
        return received(upload, padded(upload.V) if k == 1 else V, server.x.shape[-1])

    def server(self, server: State, mean: Upload, cohort: Cohort) -> State:
        """z - eta [H + lam I]_mu^-1 g, of which the largest entries go down; then H += a S.

        In the first round the Hessians have come whole, and are used at once.
        """
        z, H, w, gw, _ = server
        first = cohort.k == 1
        new = H + self.rule(first, z.shape[-1]).a * mean.S
        M = symmetric.shift(new if first else H, self.lam)
        if isinstance(mean.c, Tensor):
            w = z
            g = gw = mean.c + self.lam * z
        else:
            values, vectors = raised(M, self.mu)
            turned = times(vectors.mT, (z - w).double()) * values
            g = gw + times(vectors, turned).to(z.dtype)
        change = -at(self.eta, cohort.k) * clipped(M, g, self.mu)
        if not self.down:
            return State(z + change, new, w, gw, ())
        places = change.abs().topk(self.down).indices
        v = (change.gather(-1, places), places.int())
        return State(z + spread(v, z), new, w, gw, v)

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        """The length of the last gradient that was sent."""
        return {"grad_norm": norm(server.gw)[:, 0]}


# ---- BL2 ----


class Models(NamedTuple):
    """Server state of BL2: sums over the clients seen so far."""

    x: Tensor  # [trials, d]
    H: Tensor  # [trials, d, d]
    l: Tensor  # [trials, 1], with the penalty
    g: Tensor  # [trials, d]
    grad_norm: Tensor  # [trials, 1], of the sum of models at x


class Part(NamedTuple):
    """What a client of BL2 keeps: g = (V L V^T + l I) w - gradient(w) always."""

    V: Tree
    L: Tensor
    l: Tensor  # |L - Gam| + lam; 0 before the first round
    w: Tensor
    g: Tensor
    seen: Tensor  # [trials, 1]: 0 before the first round, then 1


class Known(NamedTuple):
    """What the server remembers of a client of BL2."""

    V: Tree
    w: Tensor
    seen: Tensor  # [trials, 1] of 0 and 1


class Change(NamedTuple):
    """To the server."""

    g: Any  # [M, trials, d] or nothing; received, computed where the client sent nothing
    S: Any  # as sent; received, the change of V_i L_i V_i^T
    l: Tensor  # [M, trials, 1]
    V: Any  # [M, trials, d, r] in a client's first round; received, nothing


@hyper
class BL2(Base):
    """FedNL-PP in the basis of each client's rows, with partial participation.

    >>> BL2(compressor="topk:82").p
    1.0
    """

    compressor: str = param(default="topk:100", doc="of r x r matrices: none, rank:R or topk:K")
    basis: str = param(default="data", doc="data (basis of the client's rows) or standard")
    p: float = param(default=1.0, doc="probability that a client sends its gradient")
    a: Scalar = param(default=1.0, doc="Hessian learning rate α")
    lam: float = param(default=0.0, doc="strength λ of the l2 penalty; 0: that of the run")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self)

    def server_init(self, x: Tensor) -> Models:
        symmetric.check_size(x)
        zero = x.new_zeros(len(x), 1)
        return Models(x, zeros(x), zero, torch.zeros_like(x), zero.double())

    def client_init(self, x: Tensor) -> Part:
        zero = x.new_zeros(len(x), 1)
        return Part(self.room(x), zeros(x), zero, x, torch.zeros_like(x), zero)

    def memory_init(self, x: Tensor) -> Known:
        return Known(self.room(x), x, x.new_zeros(len(x), 1))

    def client(self, f: Objective, x: Tensor, own: Part, local: Local) -> Reply:
        """Learns L_i and l_i at x; with probability p its point w_i moves there."""
        blank = x.is_meta  # shapes have no numbers
        first = local.k == 1 or not (blank or bool(own.seen.any()))
        loss, c, X, V = view(f, x, local, self.lam, self.known(own.V, first))
        L = within(own.L, X)
        S, new = learn(X - L, L, local, self.rule(first, X.shape[-1]))
        l = size(X - new) + self.lam
        u = local.uniform("gradient", 1)
        if first or blank or float(u) < self.p:
            w = solver.at_clients(x, local)
            g = product(V, new, w) + (l - self.lam) * w - back(V, c)
            sent: Tree = g - own.g
        else:
            w = own.w
            g = own.g + product(V, new - L, w) + (l - own.l) * w
            sent = ()
        kept = Part(padded(V), square(new, x.shape[-1]), l, w, g, torch.ones_like(l))
        return Reply(Change(sent, S, l - own.l, V if first else ()), kept, loss)

    def receive(
        self,
        server: Models,
        upload: Change,
        known: Known,
        k: int,  # noqa: ARG002
    ) -> tuple[Tree, Tree]:
        """The changes in the standard basis; without a gradient, that of g_i at the known w_i."""
        d = server.x.shape[-1]
        rate = torch.as_tensor(self.rule(False, d).a, dtype=known.w.dtype, device=known.w.device)
        V = wide(upload.V) if isinstance(upload.V, Tensor) else known.V
        (_, S, _), _ = received(Upload((), upload.S, ()), V, d)
        S = S * torch.where(known.seen.unsqueeze(-1) > 0, rate, 1.0)
        if isinstance(upload.g, Tensor):
            g = upload.g
            w = server.x.expand_as(known.w)
        else:
            w = known.w
            g = times(S, w) + upload.l * w
        return Change(g, S, upload.l, ()), Known(V, w, torch.ones_like(known.seen))

    def server(self, server: Models, mean: Change, cohort: Cohort) -> Models:
        """The minimum (H + l I)^-1 g of the sum of all clients' last models."""
        x = server.x
        H = server.H + cohort.mass * mean.S
        l = server.l + cohort.mass * mean.l
        g = server.g + cohort.mass * mean.g
        M = symmetric.shift(H, l)
        slope = times(M, x) - g
        return Models(symmetric.solve(M, g).to(x.dtype), H, l, g, norm(slope))

    def diagnostics(self, server: Models) -> dict[str, Tensor]:
        return {"grad_norm": server.grad_norm[:, 0]}


# ---- BL3 ----


class Above(NamedTuple):
    """Server state of BL3."""

    x: Tensor  # [trials, d]
    H: Tensor  # [trials, d, d], the matrix of the learnt coefficients
    grad_norm: Tensor  # [trials, 1]


class Pair(NamedTuple):
    """What a client of BL3 keeps, padded to d x d."""

    V: Tree
    L: Tensor


class Ratio(NamedTuple):
    """To the server."""

    c: Any  # [M, trials, r]; received, the gradient without the penalty [M, trials, d]
    S: Any  # as sent; received, the change of the matrix
    V: Any  # [M, trials, d, r] in round 1; received, nothing
    gamma: Any  # [M, trials, 1]; received, C_i / 2
    beta: Tensor  # [M, trials, 1]; received, the maximum


@hyper
class BL3(Base):
    """Newton's method with an upper bound of the Hessian from learned coefficients.

    >>> BL3().c
    0.25
    """

    needs_all: ClassVar[str] = "bl2"

    eta: Step = param(default=1.0, doc="server step size η; below 1 it damps the Newton step")
    compressor: str = param(default="topk:100", doc="of the coefficients: none, rank:R or topk:K")
    basis: str = param(default="data", doc="data (basis of the client's rows) or standard")
    c: float = param(default=0.25, doc="lower bound of γ_i = max |L_i|")
    a: Scalar = param(default=1.0, doc="learning rate α of the coefficients")
    lam: float = param(default=0.0, doc="strength λ of the l2 penalty; 0: that of the run")

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "eta")
        positive(self, "c", schedules=False)

    def server_init(self, x: Tensor) -> Above:
        symmetric.check_size(x)
        return Above(x, zeros(x), x.new_zeros(len(x), 1).double())

    def client_init(self, x: Tensor) -> Pair:
        return Pair(self.room(x), zeros(x))

    def memory_init(self, x: Tensor) -> Tree:
        return self.room(x)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """One exchange; of beta the server gets the maximum."""
        (only,) = super().phases
        return (only._replace(largest=("beta",)),)

    def client(self, f: Objective, x: Tensor, own: Pair, local: Local) -> Reply:
        """Learns the coefficients at x; sends gamma_i and beta_i of what it has learnt."""
        first = local.k == 1
        loss, c, X, V = view(f, x, local, self.lam, self.known(own.V, first))
        X = coefficients(X)
        L = within(own.L, X)
        S, L = learn(X - L, L, local, self.rule(first, X.shape[-1]))
        gamma = L.abs().amax((-2, -1)).clamp(min=self.c)[..., None]
        twice = 2 * gamma.unsqueeze(-1)
        beta = ((X + twice) / (L + twice)).amax((-2, -1))[..., None]
        kept = Pair(padded(V), square(L, x.shape[-1]))
        return Reply(Ratio(c, S, V if first else (), gamma, beta), kept, loss)

    def receive(self, server: Above, upload: Ratio, V: Any, k: int) -> tuple[Tree, Tree]:
        """Gradient and matrices in the standard basis."""
        d = server.x.shape[-1]
        V = padded(upload.V) if k == 1 else V
        S = combined(whole(upload.S, d))
        used = V.ne(0).any(-2) if isinstance(V, Tensor) else torch.ones_like(server.x).bool()
        ones = (used.unsqueeze(-1) & used.unsqueeze(-2)).to(S.dtype)
        C = combined(upload.gamma.unsqueeze(-1) * ones)
        if isinstance(V, Tensor):
            S = V @ S @ V.mT
            C = V @ C @ V.mT
        c = back(V, pad(upload.c, (0, d - upload.c.shape[-1])))
        return Ratio(c, S, (), C, upload.beta), V

    def server(self, server: Above, mean: Ratio, cohort: Cohort) -> Above:
        """H learns, then x - eta (beta (H + C) - C + lam I)^-1 g."""
        x = server.x
        g = mean.c + self.lam * x
        H = server.H + self.rule(cohort.k == 1, x.shape[-1]).a * mean.S
        beta = mean.beta.unsqueeze(-1)
        M = beta * H + 2 * (beta - 1) * mean.gamma
        step = symmetric.solve(symmetric.shift(M, self.lam), g).to(x.dtype)
        return Above(x - at(self.eta, cohort.k) * step, H, norm(g))

    def diagnostics(self, server: Above) -> dict[str, Tensor]:
        return {"grad_norm": server.grad_norm[:, 0]}
