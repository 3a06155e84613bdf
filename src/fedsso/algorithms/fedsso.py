"""FedSSO. Ma et al., "FedSSO: A Federated Server-Side Second-Order Optimization Algorithm", arXiv
2206.09576.

    x    global model x_k                        alpha     client step
    v    weighted mean of the local models       tau       local steps (their weighted mean if clients differ)
    g    (x_k - v_k) / (alpha tau)               eta       server step
    s    x_k - x_{k-1}                           lam, Lam  bounds of the curvature ||y||^2 / y^T s
    y    g_k - g_{k-1}                           R         B starts anew whenever k mod R = 0
    B    estimate of the Hessian, B_1 = I        r         radius of the guard
    L    |y| / |s|, the gradient's steepness     gamma     B starts from I / gamma (guarded form bfgs; else from I)
                                                 t         the part of -B^-1 g that a step was

Clients are FedAvg's, unchanged. guard="none" is the paper's Algorithm 1. guard="adaptive" looks
back along the last step: of its slope the share theta = g_k^T s / -g_{k-1}^T s is left, so on a
parabola the minimum lies at 1/(1 + theta) of the step. If the step was cut to the radius or too
long, r is multiplied by that, within bounds. If it was not cut, B was wrong: where it has learned
nothing yet, gamma follows. And a y that hardly points along s is mostly noise: it is drawn towards
the last step's B s, which the server knows, since s = -t B^-1 g_{k-1}, and which changes little.

alpha="auto" starts at 0.01 and sets alpha = 0.2 / (tau L) with the least L of the first rounds, so
that a client's own steps change its gradient by about a fifth; at most 0.1, since clients may be
steeper than their mean. The server tells them, with the model. A round that explodes is undone:
back to the model before the last step, and on from there as in round 1, with a thousandth of alpha.
A loss 1000 times the first is an explosion; 10 times where none was sound yet.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from ..algorithm import (
    BLOW_UP,
    Algorithm,
    Auto,
    Cohort,
    Local,
    Objective,
    Reply,
    Scalar,
    Step,
    Tree,
    at,
    at_least,
    gram,
    hyper,
    param,
    positive,
)
from ..algorithm import local as solver
from ..errors import InputError, unknown
from ..maths import quasi_newton as qn

log = logging.getLogger("fedsso")
GUARDS = ("adaptive", "none")
TRUSTED = 0.3  # cosine of s and y from which on y is taken as it is
GROWTH, EARLY = (
    (10, 2),
    4,
)  # what radius and gamma may grow by in a round: in the first rounds, and later
FLATTEST = 100  # largest gamma
FIRST, LARGEST, DRIFT = (
    0.01,
    0.1,
    0.2,
)  # alpha="auto": the step of the first round, the largest, and alpha tau L
SHRINK, WARY = (
    1e-3,
    10.0,
)  # alpha="auto": what an explosion leaves of alpha; how far the loss may rise until it fits


class Guard(NamedTuple):
    """The trust region, all [trials, 1]."""

    radius: Tensor
    gamma: Tensor  # B starts from I / gamma, in form bfgs
    slope: Tensor  # -g_{k-1}^T s of the last step
    share: Tensor  # t: which part of -B^-1 g_{k-1} the last step was
    capped: Tensor  # whether it was cut to the radius


class State(NamedTuple):
    """Server state."""

    x: Tensor  # [trials, d]
    g: Tensor  # g of the last round
    s: Tensor  # last step
    curvature: Tree
    guard: Guard
    seen: Tensor  # [trials, 5]: y^T s, overridden, skipped, ||g|| and alpha of the last round
    choice: Choice


class Choice(NamedTuple):
    """Of alpha="auto", all [trials, 1]."""

    alpha: Tensor  # the client step of the next round
    L: Tensor  # the least steepness seen
    undone: Tensor  # rounds that were undone


class Message(NamedTuple):
    """To the clients, where the server chooses their step."""

    x: Tensor
    alpha: Tensor


class Undoing(Algorithm):
    """What FedSSO does where a round explodes while the server chooses the clients' step."""

    alpha: Step | Auto
    guard: str

    def bears(self, server: State) -> Scalar:
        probing = (server.choice.undone[:, 0] > 0) & (server.g == 0).all(
            -1
        )  # no round was sound yet
        return torch.where(probing, WARY, BLOW_UP)

    def undo(self, server: State) -> tuple[State, Tensor] | None:
        bounded = (
            isinstance(self.alpha, str) and self.guard == "adaptive"
        )  # unguarded steps do not depend on alpha
        return _undone(server) if bounded else None


@hyper
class FedSSO(Undoing):
    """Server-side BFGS on averaged gradients.

    >>> FedSSO(alpha=0.001, guard="none", R=200).eta
    1.0
    """

    alpha: Step | Auto = param(
        default="auto", doc="client step α; auto: chosen in the first rounds"
    )
    eta: Step = param(default=1.0, doc="server step η")
    R: int | None = param(
        default=None, doc="rounds between resets of B; none: never (the paper: 200)"
    )
    lam: Scalar = param(default=1e-4, doc="lower bound λ of the curvature")
    Lam: Scalar = param(default=9999.0, doc="upper bound Λ of the curvature")
    form: str = param(default="bfgs", doc="bfgs, bfgs-dense, dfp, dfp-dense or lbfgs")
    guard: str = param(
        default="adaptive",
        doc="adaptive: radius, scale, damped pairs; none: the paper's Algorithm 1",
    )
    pairs: int = param(default=200, doc="pairs (s, y) held; beyond it the oldest leaves")
    m: int = param(default=20, doc="window of form lbfgs")

    def __post_init__(self) -> None:
        _check(self)

    def server_init(self, x: Tensor) -> State:
        none, zero = x.new_zeros(x.shape[0], 1, dtype=torch.float64), x.new_zeros(x.shape)
        choice = Choice(x.new_full(none.shape, FIRST), none.new_full(none.shape, torch.inf), none)
        guard = Guard(none, none.new_ones(none.shape), none, none, none.bool())
        return State(
            x, zero, zero, _form(self, x, 0).init(x), guard, none.expand(-1, 5).contiguous(), choice
        )

    def broadcast(self, server: State) -> Tensor | Message:
        return Message(server.x, server.choice.alpha) if isinstance(self.alpha, str) else server.x

    def client(
        self, f: Objective, message: Tensor | Message, own: tuple[()], local: Local
    ) -> Reply:
        x, alpha = (message, at(self.alpha, local.k)) if isinstance(message, Tensor) else message
        delta, loss = solver.sgd(f, x, local, alpha)  # Alg. 1, lines 4-8
        return Reply(delta, own, loss)

    def server(self, server: State, delta: Tensor, cohort: Cohort) -> State:
        k, x, s = cohort.k, server.x, server.s
        alpha, adaptive = at(self.alpha, k, server.choice.alpha), self.guard == "adaptive"
        g = delta / (-alpha * cohort.steps)  # Alg. 1, line 11
        y = g - server.g  # line 12; in round 1 s = 0, so no pair enters
        products, guard = gram(s, y, g), server.guard
        choice = (
            _chosen(server.choice, products, cohort)
            if isinstance(self.alpha, str)
            else server.choice
        )
        if adaptive:
            guard = _adapted(guard, products, alpha * cohort.steps, k - choice.undone > EARLY)
            y = _damped(y, server.g, products, guard)
            products = gram(s, y, g)
        form = _form(self, x, k, guard.gamma)
        pair = qn.judge(products, self.lam, self.Lam, dual=form.dual)
        reset = self.R is not None and k % self.R == 0
        curvature, direction = form.step(server.curvature, s, y, g, pair, k, reset)  # line 13
        slope, length = torch.split(gram(g, direction)[..., 1], 1, -1)  # g^T B^-1 g, ||B^-1 g||^2
        longest = (
            guard.radius / length.sqrt().clamp(min=1e-300)
            if adaptive
            else torch.full_like(slope, torch.inf)
        )
        step = torch.minimum(at(self.eta, k) * torch.ones_like(slope), longest)
        move = direction.mul_(-step.to(x.dtype))
        new = x + move  # line 14
        s = torch.sub(new, x, out=move)  # after rounding, as the clients see it
        guard = guard._replace(slope=step * slope, share=step, capped=step == longest)
        return State(new, g, s, curvature, guard, _seen(pair, reset, products, alpha), choice)

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return _told(self, server)


def _check(record: FedSSO) -> None:
    """Refuse values that the algorithm cannot work with."""
    if isinstance(record.alpha, str) and record.alpha != "auto":
        raise InputError(f"alpha must be a number or 'auto', got alpha={record.alpha!r}")
    positive(record, "eta", *([] if isinstance(record.alpha, str) else ["alpha"]))
    positive(record, "lam", "Lam", schedules=False)
    if record.lam >= record.Lam:
        raise InputError(
            f"lam must be < Lam, got lam={record.lam}, Lam={record.Lam}; the paper: 1e-4 and 9999"
        )
    at_least(record, "R", 2, none=True)
    at_least(record, "pairs", 1, most=10_000)
    at_least(record, "m", 1, most=10_000)
    if record.guard not in GUARDS:
        raise unknown("guard", record.guard, GUARDS)
    qn.form(record.form, record.pairs, record.m)


def _chosen(choice: Choice, products: Tensor, cohort: Cohort) -> Choice:
    """alpha tau L = DRIFT at the least L that the first rounds show, or the first pair if it comes
    later.

    After an explosion at the largest L of these rounds: where a loss has run away its slope changes
    little.
    """
    ss, yy, wary = products[..., 0, :1], products[..., 1, 1:2], choice.undone > 0
    late = cohort.k - choice.undone > EARLY + 1
    seen = (yy / ss).sqrt()
    chosen = torch.where(
        wary & choice.L.isfinite(), torch.maximum(seen, choice.L), torch.minimum(seen, choice.L)
    )
    L = torch.where((ss > 0) & (~late | choice.L.isinf() & ~wary), chosen, choice.L)
    wanted = (DRIFT / (cohort.steps * L)).clamp(max=LARGEST).to(choice.alpha.dtype)
    return choice._replace(
        alpha=torch.where(L.isinf() | late & (L == choice.L), choice.alpha, wanted), L=L
    )


def _undone(server: State) -> tuple[State, Tensor]:
    """The state before the last step, with nothing known of its length, and whether anything has
    changed with it: there was a step, or alpha can be smaller still."""
    none, choice = torch.zeros_like(server.guard.radius), server.choice
    least = torch.finfo(choice.alpha.dtype).tiny
    alpha = SHRINK * choice.alpha
    changed = (alpha >= least) | (server.s != 0).any(-1, keepdim=True)
    choice = Choice(alpha.clamp(min=least), torch.full_like(choice.L, torch.inf), choice.undone + 1)
    guard = Guard(none, torch.ones_like(none), none, none, none.bool())
    seen = torch.cat(
        [none * torch.nan, none, none, none * torch.nan, server.choice.alpha.double()], -1
    )
    back = server._replace(
        x=server.x - server.s, s=torch.zeros_like(server.s), guard=guard, seen=seen, choice=choice
    )
    return back, changed[:, 0]


def _damped(y: Tensor, old: Tensor, products: Tensor, guard: Guard) -> Tensor:
    """y, as far as its angle to s lets one trust it, else B s = -t g_{k-1}; nothing where either
    points against s."""
    ss, sy, yy = products[..., 0, 0], products[..., 0, 1], products[..., 1, 1]
    trust = (sy / (TRUSTED * (ss * yy).sqrt())).clamp(0, 1).nan_to_num(0.0)[..., None] * (
        guard.slope > 0
    )
    known = torch.where(trust > 0, (1 - trust) * guard.share, 0.0)
    return y.mul_(trust.to(y.dtype)).sub_(known.to(y.dtype) * old)


def _adapted(guard: Guard, products: Tensor, work: Scalar, late: Tensor) -> Guard:
    """Radius and gamma after a look at g_k^T s, the slope found at the end of the last step."""
    r = torch.where(
        guard.radius > 0, guard.radius, work * products[..., 2, 2:].sqrt()
    )  # at first the FedAvg step
    theta = torch.where(
        guard.slope > 0, products[..., 0, 2:] / guard.slope, 0.0
    )  # before the first step it is 0
    first, then = (theta.new_tensor(1 / growth) for growth in GROWTH)
    m = 1 / torch.maximum(1 + theta, torch.where(late, then, first)).clamp(max=2)
    r = torch.where((m < 1) | guard.capped, m * r, r)
    n = torch.where(
        guard.capped | (guard.slope <= 0), 1.0, m * guard.share
    )  # uncut it was eta B^-1 g: eta is no news
    return guard._replace(radius=r, gamma=(n * guard.gamma).clamp(1, FLATTEST))


def _seen(pair: qn.Verdict, reset: bool, products: Tensor, alpha: Scalar) -> Tensor:
    """What the trace tells of the round; a pair that a reset drops counts neither as overridden nor
    as skipped."""
    judged, size = not reset, products[..., 2, 2:].sqrt()
    return torch.cat(
        [
            pair.rho,
            pair.overridden & judged,
            pair.skipped & judged,
            size,
            alpha * torch.ones_like(size),
        ],
        -1,
    )


def _told(record: FedSSO, server: State) -> dict[str, Tensor]:
    """Columns of the trace; gamma and alpha where they mean something."""
    ys, overridden, skipped, size, alpha = server.seen.unbind(-1)
    r, gamma = server.guard.radius[:, 0], server.guard.gamma[:, 0]
    adaptive = record.guard == "adaptive"
    told = {"ys": ys, "overridden": overridden, "skipped": skipped, "grad_norm": size}
    told["radius"] = r if adaptive else r * torch.nan
    if adaptive and record.form == "bfgs":
        told["gamma"] = gamma
    return told | {"alpha": alpha} if isinstance(record.alpha, str) else told


def _form(record: FedSSO, x: Tensor, k: int, gamma: float | Tensor = 1.0) -> qn.Form:
    """The form with as many pairs as fit into the memory of one trial; the log tells where that
    shows."""
    windows = {"lbfgs": min(record.m, record.pairs), "bfgs-dense": 0, "dfp-dense": 0}
    wished = windows.get(record.form, record.pairs)
    held = qn.capacity(record.form, wished, x.shape[-1], x.element_size()) if wished else 0
    if k == 0 and held < wished and not x.is_meta:
        log.warning("%d pairs of %d numbers exceed 2 GB: %d are held", wished, x.shape[-1], held)
    if k == held + 2 and (record.R is None or k < record.R) and record.form in ("bfgs", "dfp"):
        log.info("round %d: %d pairs are held at most, from now on the oldest leaves", k, held)
    return qn.form(record.form, max(1, held), max(1, held), gamma)
