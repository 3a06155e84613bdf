"""MOCHA. Smith, Chiang, Sanjabi and Talwalkar, "Federated Multi-Task Learning", NeurIPS 2017.

    W      the clients' linear models as columns, w_t that of client t
    m      clients, each of them a task
    n_t    rows of client t
    Sigma  relations of the tasks, Omega^-1, m x m; sigma_tt its diagonal
    alpha  a client's dual variables, one for each row
    b_t    mean of alpha times row over the rows of client t; B all of them
    lam    regularisation lambda
    rho    how far the others' steps may act together, the paper's sigma'

It minimises, over all models and their relations at once,

    sum_t mean loss of w_t on the rows of client t  +  lam/2 tr(W Omega W^T)

where W = B Sigma / lam holds throughout. A round is one exchange. A client gets its w_t, sigma_tt
and rho. It goes through a share `frac` of its rows in random order, and chooses each row's alpha by
dual coordinate ascent (SDCA). It sends the change of b_t. A client that is absent, or does little,
has changed b_t by little: the dual function rises all the same. After every `inner` rounds
the server finds new relations from W: Sigma = A^(1/2) / tr A^(1/2) for A = W^T W. Then it makes W
again from B, a line that the authors' code lacks: without it W no longer belongs to alpha.

Losses are the hinge max(0, 1 - y x^T w), half the squared error, and the logistic loss, for which a
step is the lower bound of the SDCA paper (Shalev-Shwartz and Zhang, JMLR 2013). With labels, each
output of the model is a problem of its own: its class (y = 1) against the rest (y = -1), of a
single output class 1 against class 0. A bias is the weight of a constant row entry 1.

The tasks are summed: the clients' weights do not count. Every client has a model of its own, which
is tested on its own rows. d numbers travel each way, and two for each output down. A client keeps
alpha; the server keeps W, B and Sigma, and must tell its clients apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import softplus

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
    param,
    positive,
)
from ...errors import InputError, one_of
from ...maths import symmetric
from ...support.sparse import by_client

LEAST = 1e-7  # eigenvalues of W^T W are raised to this


class State(NamedTuple):
    """Server state."""

    x: Tensor  # [trials, m, d], the models w_t
    B: Tensor  # [trials, m, d]
    Sigma: Tensor  # [trials, outputs, m, m]
    rho: Tensor  # [trials, outputs]
    grad_norm: Tensor  # [trials, 1], length of the change of B


class Letter(NamedTuple):
    """To one client; leaves [M, trials, ...]."""

    w: Tensor  # d numbers
    sigma: Tensor  # sigma_tt of each output
    rho: Tensor


class Rows(NamedTuple):
    """All rows of M clients; those of short clients are padded."""

    x: Tensor  # [M, rows, features], of a model with a bias with 1 as the last of them
    y: Tensor  # [M, outputs, rows]
    real: Tensor  # [M, rows] of booleans: false on padding

    @property
    def n(self) -> Tensor:
        """n_t as [M, 1, 1]."""
        return self.real.sum(-1).view(-1, 1, 1)

    @property
    def slots(self) -> Tensor:
        """The number of each row among those of its client, where its alpha is, [M, rows]."""
        return (self.real.cumsum(-1) - 1).clamp(min=0)


class Task(NamedTuple):
    """What clients need for their ascent."""

    rows: Rows
    w: Tensor  # [M, trials, outputs, features]
    scale: Tensor  # rho sigma_tt / lam, [M, trials, outputs]


Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _hinge(score: Tensor, y: Tensor, alpha: Tensor, q: Tensor) -> Tensor:
    """y alpha = clip((1 - y score) / q + y alpha, 0, 1)."""
    return y * ((1 - y * score) / q + y * alpha).clamp(0, 1)


def _squared(score: Tensor, y: Tensor, alpha: Tensor, q: Tensor) -> Tensor:
    """alpha + (y - score - alpha) / (1 + q)."""
    return alpha + (y - score - alpha) / (1 + q)


def _logistic(score: Tensor, y: Tensor, alpha: Tensor, q: Tensor) -> Tensor:
    """alpha + (y / (1 + e^(y score)) - alpha) / max(1, 1/4 + q)."""
    return alpha + (y * torch.sigmoid(-y * score) - alpha) / (0.25 + q).clamp(min=1)


RULES: dict[str, Rule] = {"hinge": _hinge, "squared": _squared, "logistic": _logistic}
"""The new alpha of a row, from score = x^T (w + rho delta_w), its y, its alpha so far, and the
curvature q = rho sigma_tt |x|^2 / (lam n_t) of the dual function."""

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "hinge": lambda score, y: (1 - y * score).clamp(min=0),
    "squared": lambda score, y: (score - y).square() / 2,
    "logistic": lambda score, y: softplus(-y * score),
}
"""The loss of a row from score = x^T w and its y."""


def rows_of(local: Local, outputs: int, bias: bool) -> Rows:
    """All rows of the clients at once, since they are gone through in random order.

    Sparse rows are made dense for that.
    """
    samples = []
    targets = []
    weights = []
    for piece in local.full():
        if piece.transposed is None:
            dense = piece.x.flatten(2).clone()  # the next piece overwrites this one
        else:
            dense = by_client(piece.x, len(piece.weight))
        samples.append(dense)
        targets.append(piece.y)
        weights.append(piece.weight)
    x = torch.cat(samples, 1)
    if bias:
        x = torch.cat((x, torch.ones_like(x[..., :1])), -1)
    return Rows(x, _signs(torch.cat(targets, 1), outputs, x.dtype), torch.cat(weights, 1) > 0)


def _signs(y: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
    """Targets [M, outputs, rows]: labels as 1 for an output's class and -1, real ones as they are.

    A single output stands for class 1.
    """
    y = y.unsqueeze(1)
    if y.is_floating_point():
        return y.to(dtype)
    first = 1 if outputs == 1 else 0
    classes = torch.arange(first, first + outputs, device=y.device).view(-1, 1)
    return 2 * (y == classes).to(dtype) - 1


def ascend(
    rule: Rule,
    task: Task,
    alpha: Tensor,
    order: Tensor,
    work: Tensor,
) -> tuple[Tensor, Tensor]:
    """Dual coordinate ascent.

    Args:
        rule: One of RULES.
        task: Rows and models of M clients.
        alpha: [M, trials, outputs, slots].
        order: Positions of the rows to go through, [M, steps].
        work: How many of these each client does, [M].

    Returns:
        delta_b [M, trials, outputs, features], and the new alpha.

    delta_w = sigma_tt delta_b / lam need not be carried beside delta_b. A row's alpha is in the
    slot of its number among the client's rows, wherever padding puts it here.
    """
    rows = task.rows
    n = rows.n
    slots = rows.slots
    squares = rows.x.square().sum(-1)
    delta = torch.zeros_like(task.w)
    each = torch.arange(len(order), device=order.device)
    for j, row in enumerate(order.unbind(-1)):
        x = rows.x[each, row].view(len(row), 1, 1, -1)
        y = rows.y[each, :, row].unsqueeze(1)
        slot = slots[each, row].view(-1, 1, 1, 1).expand(*alpha.shape[:-1], 1)
        old = alpha.gather(-1, slot).squeeze(-1)
        point = task.w + task.scale.unsqueeze(-1) * delta
        q = task.scale * squares[each, row].view(-1, 1, 1) / n
        change = rule((point * x).sum(-1), y, old, q) - old
        change = torch.where((work > j).view(-1, 1, 1), change, 0 * change)
        alpha = alpha.scatter_add(-1, slot, change.unsqueeze(-1))
        delta = delta + (change / n).unsqueeze(-1) * x
    return delta, alpha


def relations(W: Tensor) -> tuple[Tensor, Tensor]:
    """Sigma = A^(1/2) / tr A^(1/2) for A = W^T W, and rho = max_t sum_s |sigma_ts| / sigma_tt.

    W is [..., m, features]; Sigma [..., m, m], rho [...].
    """
    values, vectors = symmetric.eigh(W.double() @ W.double().mT)
    roots = values.clamp(min=LEAST).sqrt()
    root = (vectors * roots.unsqueeze(-2)) @ vectors.mT
    Sigma = root / roots.sum(-1)[..., None, None]
    diagonal = Sigma.diagonal(dim1=-2, dim2=-1)
    rho = (Sigma.abs().sum(-1) / diagonal).amax(-1)
    return Sigma.to(W.dtype), rho.to(W.dtype)


def split(v: Tensor, outputs: int, features: int) -> Tensor:
    """Flat vectors [..., d] by output, [..., outputs, features]; the bias, if any, comes last."""
    weights = v[..., : outputs * features].reshape(*v.shape[:-1], outputs, features)
    bias = v[..., outputs * features :].unsqueeze(-1)
    return torch.cat((weights, bias), -1) if bias.numel() else weights


def join(v: Tensor, features: int) -> Tensor:
    """The flat vectors that `split` takes apart."""
    weights = v[..., :features].flatten(-2)
    bias = v[..., features:].flatten(-2)
    return torch.cat((weights, bias), -1)


def empty(x: Tensor, outputs: int, m: int) -> State:
    """The state before the first round."""
    trials, d = x.shape
    zero = x.new_zeros(trials, m, d)
    Sigma = x.new_zeros(trials, outputs, m, m)
    Sigma.diagonal(dim1=-2, dim2=-1).fill_(1 / m)
    rho = x.new_ones(trials, outputs)
    return State(zero, zero, Sigma, rho, x.new_zeros(trials, 1).double())


def primal(server: State, record: MOCHA) -> Tensor:
    """W = B Sigma / lam, [trials, m, d]."""
    B = split(server.B, record.outputs, record.inputs).transpose(1, 2)
    lam = record.lam.unsqueeze(-1) if isinstance(record.lam, Tensor) else record.lam
    return join((server.Sigma @ B).transpose(1, 2), record.inputs) / lam


def draw(rows: Rows, local: Local, record: MOCHA) -> tuple[Tensor, Tensor]:
    """A random order of each client's rows [M, steps], and how many it goes through, [M]."""
    u = local.uniform("rows", record.most_rows)
    places = torch.where(rows.real, u.gather(-1, rows.slots), 2.0)  # padding comes last
    part = record.least + (1 - record.least) * local.uniform("work", 1)
    work = (record.frac * part * rows.n[..., 0]).ceil()
    steps = min(places.shape[-1], ceil(record.frac * record.most_rows))
    return places.argsort(-1)[:, :steps], work[:, 0]


def linear(shapes: Sequence[Sequence[int]]) -> tuple[int, int]:
    """The outputs and inputs of a linear model, from the shapes of its parameters.

    Raises:
        InputError: The model is not one linear map, with or without a bias.
    """
    first, *others = (tuple(shape) for shape in shapes)
    if len(first) != 2 or others not in ([], [first[:1]]):
        raise InputError(
            f"MOCHA is for linear models, got one with parameters {[first, *others]}; use "
            "model='mclr' or 'linear', or the algorithm fedper"
        )
    return first[0], first[1]


def parts_of_one(record: MOCHA, *names: str) -> None:
    """Each named field must be a share in (0, 1]."""
    positive(record, *names, schedules=False)
    for name in names:
        value = getattr(record, name)
        if value > 1:
            raise InputError(
                f"{name} must be a share in (0, 1], got {name}={value:g}; leave it out for the "
                "default"
            )


@hyper
class MOCHA(Algorithm):
    """One linear model per client and the relations between them, learned by dual ascent.

    >>> MOCHA(lam=0.01).inner
    100
    """

    personal = True

    lam: Scalar = param(default=1e-3, doc="regularisation λ")
    dual: str = param(default="hinge", doc="loss of the dual problem: hinge, squared or logistic")
    inner: int = param(default=100, doc="rounds between updates of the task relations Σ")
    frac: float = param(default=0.5, doc="fraction of its rows that a client processes per round")
    least: float = param(default=1.0, doc="smallest part of `frac`, drawn in each round; 1: all")
    outputs: int = param(default=0, doc="number of outputs; 0: that of the model")
    inputs: int = param(default=0, doc="number of inputs; 0: that of the model")
    tasks: int = param(default=0, doc="number m of clients; 0: that of the federation")
    most_rows: int = param(default=0, doc="most rows of a client; 0: those of the federation")

    def __post_init__(self) -> None:
        positive(self, "lam", schedules=False)
        parts_of_one(self, "frac", "least")
        one_of("dual", self.dual, tuple(RULES))
        at_least(self, "inner", 1)
        for name in ("outputs", "inputs", "tasks", "most_rows"):
            at_least(self, name, 0)

    def fit(
        self,
        sizes: Sequence[int],  # noqa: ARG002
        shapes: Sequence[Sequence[int]] = (),
    ) -> Self:
        """The record for a linear model, whose inputs and outputs it learns."""
        outputs, inputs = linear(shapes)
        return replace(self, outputs=outputs, inputs=inputs)

    def join(self, attendance: Attendance, d: int) -> Self:  # noqa: ARG002
        """The record for a federation, whose clients and rows it learns."""
        return replace(self, tasks=attendance.clients, most_rows=attendance.rows)

    def server_init(self, x: Tensor) -> State:
        """W = B = 0, Sigma = I / m, rho = 1: the model that the run starts from does not count."""
        return empty(x, self.outputs, self.tasks)

    def client_init(self, x: Tensor) -> Tensor:
        """alpha = 0, [trials, outputs, rows]."""
        return x.new_zeros(x.shape[0], self.outputs, self.most_rows)

    def model(self, server: State, own: Tensor) -> Tensor:  # noqa: ARG002
        """w_t of every client, [m, trials, d]."""
        return server.x.transpose(0, 1)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """One exchange, in which clients are told and heard apart."""
        return (Phase(self.letters, self.client, self.server, apart=True),)

    def letters(self, server: State, clients: Tensor) -> Letter:
        """w_t, sigma_tt and rho for each of these clients."""
        sigma = server.Sigma.diagonal(dim1=-2, dim2=-1)[..., clients]
        rho = server.rho.expand(len(clients), -1, -1)
        return Letter(server.x[:, clients].transpose(0, 1), sigma.movedim(-1, 0), rho)

    def client(self, _: Objective, message: Letter, alpha: Tensor, local: Local) -> Reply:
        """Goes through a share of the rows in random order; sends delta_b, keeps alpha."""
        rows = rows_of(local, self.outputs, message.w.shape[-1] > self.outputs * self.inputs)
        w = split(message.w, self.outputs, self.inputs)
        scores = torch.einsum("mtof,mrf->mtor", w, rows.x)
        losses = LOSSES[self.dual](scores, rows.y.unsqueeze(1)) * rows.real[:, None, None]
        task = Task(rows, w, message.rho * message.sigma / self.lam)
        order, work = draw(rows, local, self)
        delta, new = ascend(RULES[self.dual], task, alpha, order, work)
        return Reply(join(delta, self.inputs), new, losses.sum((-2, -1)) / rows.n[..., 0])

    def server(self, server: State, deltas: Tensor, cohort: Cohort) -> State:
        """B takes the changes of those who answered; then W, and in time Sigma."""
        change = torch.zeros_like(server.B)
        change[:, cohort.clients.to(change.device)] = deltas.transpose(0, 1)
        new = server._replace(B=server.B + change, grad_norm=norm(change.flatten(1)))
        new = new._replace(x=primal(new, self))
        if cohort.k % self.inner:
            return new
        W = split(new.x, self.outputs, self.inputs).transpose(1, 2)
        Sigma, rho = relations(W)
        new = new._replace(Sigma=Sigma, rho=rho)
        return new._replace(x=primal(new, self))

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return {"grad_norm": server.grad_norm[:, 0]}
