"""FedNL. Safaryan et al., "FedNL: Making Newton-Type Methods Applicable to Federated Learning",
ICML 2022.

    x    global model
    H_i  estimate of client i's Hessian
    S_i  C(Hessian_i(x) - H_i), compressed
    g    gradient of f at x
    a    Hessian learning rate alpha
    H    sum p_i H_i
    l    sum p_i l_i, l_i = |Hessian_i - H_i| (Frobenius)
    mu   lower bound of f's curvature

Clients learn their Hessians from compressed differences, H_i += a S_i, and the server learns the
mean of these. Three methods use it:

    FedNL      steps along -[H]_mu^-1 g, with the eigenvalues of H raised to mu (option 1),
               or along -(H + l I)^-1 g (option 2)
    FedNL-LS   searches along the direction of option 1
    FedNL-PP   lets some clients be absent

The server of FedNL-PP minimises the sum of the clients' last quadratic models. That of client i has
the matrix H_i + l_i I and its last point w_i. With g = sum p_i ((H_i + l_i I) w_i -
gradient_i(w_i)) the minimum is x = (H + l I)^-1 g.

Far from the minimum or on a non-convex model FedNL may diverge (option 1) or creep (option 2).
Where Hessians are singular, option 2 and FedNL-PP fail once l is 0; with first="hessian" or
compressor="none" that is at once. Option 1 does not fail there.

A client receives d numbers and sends its gradient, S_i and at most one number. S_i has R (d + 1)
numbers with compressor rank:R, K values and places with topk:K, d (d + 1) / 2 with none. FedNL-LS
also sends the direction down and ten losses up. Server and clients keep a d x d matrix each, so
that models are small.

As in the paper's experiments, H_i is at first the client's Hessian, sent whole, and mu the penalty.
From H_i = 0 option 1 may diverge and option 2 creeps until rank:1 has learnt d eigenvalues.

Two switches send less (Islamov et al., "Distributed Newton-Type Methods with Communication
Compression and Bernoulli Aggregation", 2022). A lazy client (CLAG) leaves S_i out, and its bytes,
unless |X - H_i|^2 > zeta |X - Y|^2, for its Hessian X and the one before, Y, which it then keeps;
on Flower it sends zeros instead. With often < 1 (CBAG) Hessians are neither computed nor sent in
the other rounds, by a coin that all toss together.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Self

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
    Step,
    Tree,
    at,
    dot,
    filled,
    hyper,
    norm,
    not_negative,
    param,
    positive,
)
from ...algorithm import local as solver
from ...errors import InputError, integer, one_of
from ...maths import symmetric
from ...support.trees import nbytes
from ..hessians import (
    SQUARES,
    Rule,
    clipped,
    learn,
    least_curvature,
    rule,
    size,
    tossed,
    worth,
    zeros,
)

ROUNDING = 8  # units in the last place by which a loss may be wrong


class State(NamedTuple):
    """Server state of FedNL."""

    x: Tensor  # [trials, d]
    H: Tensor  # [trials, d, d]
    grad_norm: Tensor  # [trials, 1]


class Search(NamedTuple):
    """Server state of FedNL-LS."""

    x: Tensor  # [trials, d]
    H: Tensor  # [trials, d, d]
    g: Tensor  # [trials, d]
    p: Tensor  # [trials, d], the direction
    f0: Tensor  # [trials, 1], f(x)
    t: Tensor  # [trials, 1], the last step


class Models(NamedTuple):
    """Server state of FedNL-PP: sums over the clients seen so far."""

    x: Tensor  # [trials, d]
    H: Tensor  # [trials, d, d]
    l: Tensor  # [trials, 1]
    g: Tensor  # [trials, d]
    grad_norm: Tensor  # [trials, 1], of the sum of models at x


class Own(NamedTuple):
    """What a client of FedNL-PP keeps; leaves [trials, ...].

    g = (H + l I) w - gradient(w) at its last point w, which itself need not be kept.
    """

    H: Tensor
    l: Tensor
    g: Tensor


class Upload(NamedTuple):
    """To the server."""

    g: Tensor  # [M, trials, d]
    S: Any  # as sent, or nothing; decoded, [M, trials, d, d]
    scalar: Tree  # [M, trials, 1]: l_i, f_i or nothing


def decode(upload: Upload) -> Upload:
    """The upload with S_i as a matrix, if it holds one."""
    return upload if upload.S == () else upload._replace(S=upload.S.dense(upload.g.shape[-1]))


def check(record: FedNL | FedNLLS | FedNLPP) -> None:
    """Raise InputError unless compressor, learning rate and mu make sense."""
    symmetric.parse(record.compressor)
    positive(record, "a", schedules=False)
    if getattr(record, "mu", None) is not None:
        positive(record, "mu", schedules=False)


def starts(record: FedNL | FedNLLS, k: int) -> bool:
    """Whether whole Hessians are sent in round k, and used at once.

    Otherwise a step uses the estimates of the round before, as the paper has it.
    """
    return record.first == "hessian" and k == 1


def rule_of(record: FedNL | FedNLLS, k: int, d: int) -> Rule:
    """The rule of round k: the first may send Hessians whole."""
    if starts(record, k):
        return rule("none", 1.0, d)
    return rule(record.compressor, record.a, d)


@hyper
class FedNL(Algorithm):
    """Newton's method with Hessians learned from compressed differences.

    >>> FedNL(compressor="topk:0.01").option
    1
    """

    needs_all: ClassVar[str] = "fednl-pp"
    squares: ClassVar[int] = SQUARES

    eta: Step = param(default=1.0, doc="server step size η; below 1 it damps the Newton step")
    option: int = param(
        default=1, doc="matrix of the step: 1, eigenvalues of H raised to μ; 2, H + l I"
    )
    mu: Scalar | None = param(
        default=None,
        doc="lower bound μ of the curvature (option 1); None: l2, or 0.1 if there is none",
    )
    compressor: str = param(default="rank:1", doc="none, rank:R, topk:K, powersgd:R or randk:K")
    a: Scalar = param(default=1.0, doc="Hessian learning rate α; times 1/(ω + 1) for randk")
    first: str = param(
        default="hessian", doc="first H_i: hessian (sent in full in round 1) or zero"
    )
    lazy: float = param(
        default=0.0, doc="ζ: S_i is sent only if |X − H_i|² > ζ |X − Y|², with Y the last Hessian"
    )
    often: float = param(
        default=1.0, doc="fraction of rounds in which Hessians are computed and sent (option 1)"
    )

    def __post_init__(self) -> None:
        _check(self)

    def asks(self) -> str:
        return "hvp"

    def join(self, attendance: Attendance, d: int) -> Self:  # noqa: ARG002
        """The record with mu filled in."""
        return filled(self, mu=least_curvature(self.mu, attendance.l2, 0.1))

    def server_init(self, x: Tensor) -> State:
        """H = 0; refuses a model that is too large for d x d matrices."""
        symmetric.check_size(x)
        return State(x, zeros(x), x.new_zeros(x.shape[0], 1).double())

    def client_init(self, x: Tensor) -> Tree:
        """H_i = 0, [trials, d, d]; a lazy client also keeps its last Hessian Y."""
        return (zeros(x), zeros(x)) if self.lazy else zeros(x)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """One exchange over all rows; S_i is decoded before it is averaged."""
        return (Phase(self.broadcast, self.client, self.server, decode=decode),)

    def client(
        self,
        f: Objective,
        x: Tensor,
        own: Tree,
        local: Local,
    ) -> Reply:
        """Sends gradient_i(x), S_i and, with option 2, l_i = |Hessian_i(x) - H_i|.

        The client keeps H_i + a S_i. l_i measures the estimate that this round's step uses: that
        is the old one, except where whole Hessians have just been sent.
        """
        loss, g = solver.gradient(f, x, local)
        if not tossed("hessian", local.k, self.often):
            return Reply(Upload(g, (), ()), own, loss)
        return _with_hessian(self, f, x, own, local, (loss, g))

    def server(self, server: State, mean: Upload, cohort: Cohort) -> State:
        """x - eta [H]_mu^-1 g (option 1) or x - eta (H + l I)^-1 g (option 2), then H += a S.

        The step uses the H of the round before, since S arrives with the gradient; in round 1
        with first="hessian" it uses the new one.
        """
        x = server.x
        g = mean.g
        new = server.H
        if mean.S != ():
            new = new + rule_of(self, cohort.k, x.shape[-1]).a * mean.S
        H = new if starts(self, cohort.k) else server.H
        if self.option == 1:
            step = clipped(H, g, self.mu)
        else:
            step = symmetric.solve(symmetric.shift(H, mean.scalar), g).to(x.dtype)
        return State(x - at(self.eta, cohort.k) * step, new, norm(g))

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return {"grad_norm": server.grad_norm[:, 0]}


def _check(record: FedNL) -> None:
    """Refuse values that the algorithm cannot work with."""
    positive(record, "eta")
    if integer("option", record.option) not in (1, 2):
        raise InputError(f"option must be 1 or 2, got option={record.option!r}; leave it out for 1")
    one_of("first", record.first, ("zero", "hessian"))
    not_negative(record, "lazy")
    positive(record, "often", schedules=False)
    if record.often > 1 or (record.often < 1 and record.option == 2):
        raise InputError(
            f"often must lie in (0, 1], and below 1 it needs option=1, since l_i is measured "
            f"on a new Hessian; got often={record.often:g}, option={record.option}"
        )
    check(record)


def _with_hessian(
    record: FedNL,
    f: Objective,
    x: Tensor,
    own: Tree,
    local: Local,
    first: tuple[Tensor, Tensor],
) -> Reply:
    """The reply of clients that send their Hessians, with loss and gradient as they are."""
    loss, g = first
    X = solver.hessian(f, x, local)
    H = own[0] if record.lazy else own
    lack = X - H
    speaks = worth(lack, X - own[1], record.lazy, local.k) if record.lazy else None
    heard = lack if speaks is None else lack * speaks
    S, new = learn(heard, H, local, rule_of(record, local.k, x.shape[-1]))
    l: Tree = ()
    if record.option == 2:
        l = size(X - (new if starts(record, local.k) else H))
    if speaks is None:
        return Reply(Upload(g, S, l), new, loss)
    saved = (1 - speaks[..., 0, 0]) * nbytes(S, speaks.numel())
    return Reply(Upload(g, S, l), (new, X), loss, unsent=saved)


@hyper
class FedNLLS(Algorithm):
    """FedNL with a line search over the steps 1, 1/2, ..., 2^-9.

    >>> FedNLLS(mu=0.1).compressor
    'rank:1'
    """

    needs_all: ClassVar[str] = "fednl-pp"
    squares: ClassVar[int] = SQUARES

    mu: Scalar | None = param(
        default=None, doc="lower bound μ of the curvature; None: l2, or 0.01 if there is none"
    )
    compressor: str = param(default="rank:1", doc="none, rank:R, topk:K, powersgd:R or randk:K")
    a: Scalar = param(default=1.0, doc="Hessian learning rate α; times 1/(ω + 1) for randk")
    first: str = param(
        default="hessian", doc="first H_i: hessian (sent in full in round 1) or zero"
    )

    def __post_init__(self) -> None:
        one_of("first", self.first, ("zero", "hessian"))
        check(self)

    def asks(self) -> str:
        return "hvp"

    def join(self, attendance: Attendance, d: int) -> Self:  # noqa: ARG002
        """The record with mu filled in."""
        return filled(self, mu=least_curvature(self.mu, attendance.l2, 0.01))

    def server_init(self, x: Tensor) -> Search:
        symmetric.check_size(x)
        one = x.new_ones(x.shape[0], 1)
        return Search(
            x=x,
            H=zeros(x),
            g=torch.zeros_like(x),
            p=torch.zeros_like(x),
            f0=torch.zeros_like(one),
            t=one.double(),
        )

    def client_init(self, x: Tensor) -> Tensor:
        return zeros(x)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Gradient, S_i and f_i(x) first; then the losses at the ten steps along the direction."""
        return (
            Phase(self.broadcast, self.client, self.aim, decode=decode),
            Phase(lambda server: (server.x, server.p), self.search, self.server, exact=True),
        )

    def client(self, f: Objective, x: Tensor, H: Tensor, local: Local) -> Reply:
        loss, g = solver.gradient(f, x, local)
        X = solver.hessian(f, x, local)
        S, new = learn(X - H, H, local, rule_of(self, local.k, x.shape[-1]))
        return Reply(Upload(g, S, loss.unsqueeze(-1)), new, loss)

    def aim(self, server: Search, mean: Upload, cohort: Cohort) -> Search:
        """H learns, and the direction is p = -[H]_mu^-1 g of option 1."""
        a = rule_of(self, cohort.k, server.x.shape[-1]).a
        new = server.H + a * mean.S
        H = new if starts(self, cohort.k) else server.H
        p = -clipped(H, mean.g, self.mu)
        return Search(server.x, new, mean.g, p, mean.scalar, server.t)

    def search(
        self,
        f: Objective,
        message: tuple[Tensor, Tensor],
        H: Tensor,
        local: Local,
    ) -> Reply:
        x, p = message
        return Reply(solver.along(f, x, p, local), H)

    def server(self, server: Search, losses: Tensor, _: Cohort) -> Search:
        """x + t p, for the largest t with f(x + t p) <= f(x) + t/2 g^T p."""
        x = server.x
        p = server.p
        f0 = server.f0.double()
        # an exact Newton step meets c = 1/2 with equality: rounding must not refuse it
        most = f0 + ROUNDING * torch.finfo(x.dtype).eps * f0.abs()
        t = solver.armijo(losses, most, dot(server.g, p), 0.5, server.t)
        return server._replace(x=x + t.to(x.dtype) * p, t=t)

    def diagnostics(self, server: Search) -> dict[str, Tensor]:
        return {"grad_norm": norm(server.g)[:, 0]}


@hyper
class FedNLPP(Algorithm):
    """FedNL with partial participation.

    >>> FedNLPP().compressor
    'rank:1'
    """

    squares: ClassVar[int] = SQUARES

    compressor: str = param(default="rank:1", doc="none, rank:R, topk:K, powersgd:R or randk:K")
    a: Scalar = param(default=1.0, doc="Hessian learning rate α; times 1/(ω + 1) for randk")

    def __post_init__(self) -> None:
        check(self)

    def asks(self) -> str:
        return "hvp"

    def server_init(self, x: Tensor) -> Models:
        """No client has been seen: all sums are 0."""
        symmetric.check_size(x)
        own = self.client_init(x)
        return Models(x, own.H, own.l, own.g, own.l.double())

    def client_init(self, x: Tensor) -> Own:
        return Own(zeros(x), x.new_zeros(x.shape[0], 1), torch.zeros_like(x))

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.broadcast, self.client, self.server, decode=decode),)

    def client(
        self,
        f: Objective,
        x: Tensor,
        own: Own,
        local: Local,
    ) -> Reply:
        """Learns H_i, l_i and g_i at x, and sends their changes; the client's point w_i is now x.

        Unlike FedNL the estimate is used in the round in which it is learnt.
        """
        loss, grad = solver.gradient(f, x, local)
        X = solver.hessian(f, x, local)
        S, H = learn(X - own.H, own.H, local, rule(self.compressor, self.a, x.shape[-1]))
        l = size(X - H)
        g = (H @ x.unsqueeze(-1)).squeeze(-1) + l * x - grad
        return Reply(Upload(g - own.g, S, l - own.l), Own(H, l, g), loss)

    def server(self, server: Models, mean: Upload, cohort: Cohort) -> Models:
        """The minimum x = (H + l I)^-1 g of the sum of all clients' last models.

        `mean` is over those who answered; their mass turns it into the change of the sums over
        all clients. `grad_norm` is that of the sum of models at the old x.
        """
        x = server.x
        mass = cohort.mass
        a = rule(self.compressor, self.a, x.shape[-1]).a
        H = server.H + mass * a * mean.S
        l = server.l + mass * mean.scalar
        g = server.g + mass * mean.g
        A = symmetric.shift(H, l)
        slope = (A @ x.unsqueeze(-1)).squeeze(-1) - g
        return Models(symmetric.solve(A, g).to(x.dtype), H, l, g, norm(slope))

    def diagnostics(self, server: Models) -> dict[str, Tensor]:
        return {"grad_norm": server.grad_norm[:, 0]}
