"""Newton-Learn, NL1 and NL2. Islamov, Qian, Richtárik, "Distributed Second Order Methods with Fast
Rates and Compressed Communication", ICML 2021.

    x       global model
    a_ij    row j of client i, with a 1 at its end where the model has a bias
    phi_ij  loss of that row as a function of a_ij^T x
    h_ij    what is learnt of phi_ij''
    m_i     rows of client i
    lam     strength of the penalty
    B       sum p_i/m_i h_ij a_ij a_ij^T, the learnt Hessian without the penalty
    G       sum p_i/m_i a_ij a_ij^T
    gamma   a bound of |phi''|; 1/4 for the logistic loss
    beta    max_ij (phi_ij''(x) + 2 gamma) / (h_ij + 2 gamma)
    g       gradient of f at x
    K       rows that a client refreshes in a round

The Hessian of a linear model with one output is a sum over rows, so that one number of each row is
all there is to learn. In a round a client draws K of its rows, sets h_ij = phi_ij''(x) there, and
sends the changes with the rows themselves. The server adds the changes to B:

    NL1   x - (B + lam I)^-1 g, with the B of the round before; it needs lam > 0
    NL2   x - (beta (B + 2 gamma G) - 2 gamma G + lam I)^-1 g, with the new B

The matrix of NL2 is never below the Hessian, so that it is the safer one far from the minimum. It
needs the maximum of the clients' beta_i, which no mean tells. The paper's Rand-K with the rate
K/m_i is this refreshing; its Bernoulli variant and its cubic method are not here.

**Rows of the data travel to the server**: where data are private, use fednl or bl1. A softmax model
is not of this form and is refused.

A client receives d numbers. It sends d + K (d + 1), with NL2 one more; in round 1 instead of the
rows the triangle of its B_i, with NL2 that of its G_i as well. It keeps m_i numbers; the state here
has as many for every client as the largest one needs.
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
    Step,
    Tree,
    at,
    at_least,
    filled,
    hyper,
    norm,
    not_negative,
    param,
    positive,
)
from ...algorithm import local as solver
from ...maths import symmetric
from ...maths.symmetric import Packed
from ..hessians import SQUARES, zeros


class State(NamedTuple):
    """Server state."""

    x: Tensor  # [trials, d]
    B: Tensor  # [trials, d, d]
    G: Tree  # [trials, d, d], with NL2
    grad_norm: Tensor  # [trials, 1]


class Rows(NamedTuple):
    """Changes of h_ij, each divided by m_i, and the rows that they belong to."""

    change: Tensor  # [M, trials, K]
    a: Tensor  # [M, trials, K, d]

    def dense(self, d: int) -> Tensor:  # noqa: ARG002
        """The change of B_i, [M, trials, d, d]."""
        return (self.a * self.change.unsqueeze(-1)).mT @ self.a


class Upload(NamedTuple):
    """To the server."""

    g: Tensor  # [M, trials, d]
    B: Any  # as sent: the whole B_i, or rows; decoded, [M, trials, d, d]
    G: Any  # the same of G_i, in the first round of NL2
    beta: Tree  # [M, trials, 1], with NL2


class Seen(NamedTuple):
    """What a pass over the clients' rows has found, in the order of the rows."""

    curvature: Tensor  # phi'' of each row, [M, trials, n]; 0 beyond a client's last row
    weight: Tensor  # 1/m_i, [M, n]; 0 beyond the last row
    drawn: Tensor  # the rows that were drawn, [M, K, d]


def decode(upload: Upload) -> Upload:
    """The upload with matrices."""
    d = upload.g.shape[-1]
    G = upload.G if upload.G == () else upload.G.dense(d)
    return upload._replace(B=upload.B.dense(d), G=G)


def draw(local: Local, n: int, K: int) -> Tensor:
    """K of each client's rows without repetition, [M, K]; of a client with fewer rows, all.

    The other places are beyond the last row and stand for nothing: their weight is 0.
    """
    counts: Tensor | int = 0
    for piece in local.full():
        counts = counts + (piece.weight > 0).sum(-1, keepdim=True)
    u = local.uniform("rows", n)
    inside = torch.arange(n, device=u.device) < counts
    return torch.where(inside, u, -1.0).topk(K).indices


def look(
    f: Objective,
    x: Tensor,
    local: Local,
    n: int,
    places: Tensor,
) -> Seen:
    """One pass over the rows: phi'' at x of all of them, and the drawn ones.

    Args:
        f: The clients' losses, of a linear model with one output.
        x: The model, [trials, d].
        local: The clients' rows.
        n: The rows of the client that has most.
        places: Which rows are wanted, [M, K].
    """
    x = solver.at_clients(x, local)
    M, T, d = x.shape
    curvature = x.new_zeros(M, T, n + 1)  # padding of a piece goes into the last place
    weight = x.new_zeros(M, n + 1)
    drawn = x.new_zeros(*places.shape, d)
    before = places.new_zeros(M, 1)
    for piece in local.full():
        a, c = f.rows(x, piece)
        inside = piece.weight > 0
        count = inside.sum(-1, keepdim=True)
        steps = torch.arange(inside.shape[-1], device=a.device)
        index = torch.where(inside, before + steps, n)
        curvature.scatter_(-1, index.unsqueeze(1).expand_as(c), c)
        weight.scatter_(-1, index, piece.weight.to(weight.dtype))
        here = places - before
        hit = (here >= 0) & (here < count)
        nearest = here.clamp(0, len(steps) - 1).unsqueeze(-1)
        drawn += torch.take_along_dim(a, nearest, 1) * hit.unsqueeze(-1)
        before = before + count
    return Seen(curvature[..., :n], weight[:, :n], drawn)


def gram(f: Objective, x: Tensor, local: Local) -> Tensor:
    """G_i, the mean of a a^T over all rows of each client, [M, trials, d, d]."""
    x = solver.at_clients(x, local)
    total = x.new_zeros(*x.shape, x.shape[-1])
    for piece in local.full():
        a, _ = f.rows(x, piece)
        total += ((a * piece.weight.unsqueeze(-1)).mT @ a).unsqueeze(1)
    return total


class Learner(Algorithm):
    """What NL1 and NL2 share: the clients' h_ij and how they are learnt."""

    needs_all: ClassVar[str] = "fednl-pp"
    squares: ClassVar[int] = SQUARES
    gamma: float = 0.0  # NL2's

    eta: Step
    K: int
    rows: int
    lam: float

    def __post_init__(self) -> None:
        positive(self, "eta")
        at_least(self, "K", 1)
        at_least(self, "rows", 0)
        not_negative(self, "lam")

    def asks(self) -> str:
        return "rows"

    def join(self, attendance: Attendance, d: int) -> Self:  # noqa: ARG002
        """The record with the largest client's rows and the penalty filled in."""
        rows = self.rows or attendance.rows
        return filled(self, rows=rows, lam=self.lam or attendance.l2)

    def server_init(self, x: Tensor) -> State:
        """B = 0; refuses a model that is too large for d x d matrices."""
        symmetric.check_size(x)
        G = zeros(x) if self.gamma else ()
        return State(x, zeros(x), G, x.new_zeros(x.shape[0], 1).double())

    def client_init(self, x: Tensor) -> Tensor:
        """h_ij = 0, [trials, places]; they are set in round 1."""
        return x.new_zeros(x.shape[0], self.places)

    @property
    def places(self) -> int:
        """Room for the rows of the largest client, and for K."""
        return max(self.rows, self.K)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """One exchange over all rows; of beta the server gets the maximum."""
        largest = ("beta",) if self.gamma else ()
        only = Phase(self.broadcast, self.client, self.server, decode=decode, largest=largest)
        return (only,)

    def client(self, f: Objective, x: Tensor, h: Tensor, local: Local) -> Reply:
        """Sets K of the h_ij to phi_ij''(x), and sends the changes; in round 1 sets all of them."""
        loss, g = solver.gradient(f, x, local)
        n = self.places
        places = draw(local, n, 0 if local.k == 1 else self.K)
        seen = look(f, x, local, n, places)
        if local.k == 1:
            X = symmetric.shift(solver.hessian(f, x, local), -self.lam)
            whole = Packed(symmetric.pack(gram(f, x, local))) if self.gamma else ()
            upload = Upload(g, Packed(symmetric.pack(X)), whole, ())
            new = seen.curvature
        else:
            where = places.unsqueeze(1).expand(-1, x.shape[-2], -1)
            fresh = seen.curvature.gather(-1, where)
            change = (fresh - h.gather(-1, where)) * seen.weight.gather(-1, places).unsqueeze(1)
            a = seen.drawn.unsqueeze(1).expand(-1, x.shape[-2], -1, -1)
            upload = Upload(g, Rows(change, a), (), ())
            new = h.scatter(-1, where, fresh)
        return Reply(self.measured(upload, seen, new), new, loss)

    def measured(self, upload: Upload, seen: Seen, h: Tensor) -> Upload:  # noqa: ARG002
        """The upload with what it tells of the learnt h [M, trials, n] beside the changes."""
        return upload

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return {"grad_norm": server.grad_norm[:, 0]}

    def moved(self, server: State, mean: Upload, M: Tensor, cohort: Cohort) -> Tensor:
        """x - eta (M + lam I)^-1 g for a matrix M [trials, d, d]."""
        step = symmetric.solve(symmetric.shift(M, self.lam), mean.g).to(server.x.dtype)
        return server.x - at(self.eta, cohort.k) * step


@hyper
class NL1(Learner):
    """Newton's method with second derivatives learned row by row; sends rows to the server.

    >>> NL1(K=5).eta
    1.0
    """

    eta: Step = param(default=1.0, doc="server step size η; below 1 it damps the Newton step")
    K: int = param(default=1, doc="rows that a client updates and sends per round")
    rows: int = param(default=0, doc="rows of the largest client; 0: that of the federation")
    lam: float = param(default=0.0, doc="strength λ of the l2 penalty; 0: that of the run")

    def server(self, server: State, mean: Upload, cohort: Cohort) -> State:
        """A step with the B of the round before, then B learns; in round 1 B is used at once."""
        new = server.B + mean.B
        x = self.moved(server, mean, new if cohort.k == 1 else server.B, cohort)
        return State(x, new, (), norm(mean.g))


@hyper
class NL2(Learner):
    """Newton-Learn with a matrix never below the Hessian; sends rows to the server.

    >>> NL2().gamma
    0.25
    """

    eta: Step = param(default=1.0, doc="server step size η; below 1 it damps the Newton step")
    K: int = param(default=1, doc="rows that a client updates and sends per round")
    gamma: float = param(default=0.25, doc="bound γ of φ'': 1/4 for the logistic loss, 2 for mse")
    rows: int = param(default=0, doc="rows of the largest client; 0: that of the federation")
    lam: float = param(default=0.0, doc="strength λ of the l2 penalty; 0: that of the run")

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "gamma", schedules=False)

    def measured(self, upload: Upload, seen: Seen, h: Tensor) -> Upload:
        """With beta_i = max_j (phi_ij'' + 2 gamma) / (h_ij + 2 gamma); places beyond count as 1."""
        n = seen.curvature.shape[-1]
        ratio = (seen.curvature + 2 * self.gamma) / (h[..., :n] + 2 * self.gamma)
        return upload._replace(beta=ratio.amax(-1, keepdim=True))

    def server(self, server: State, mean: Upload, cohort: Cohort) -> State:
        """B learns, then a step with beta (B + 2 gamma G) - 2 gamma G."""
        B = server.B + mean.B
        G = mean.G if cohort.k == 1 else server.G
        beta = mean.beta.unsqueeze(-1)
        M = beta * B + 2 * self.gamma * (beta - 1) * G
        return State(self.moved(server, mean, M, cohort), B, G, norm(mean.g))
