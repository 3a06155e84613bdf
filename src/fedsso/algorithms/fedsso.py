"""FedSSO. Ma et al., "FedSSO: A Federated Server-Side Second-Order Optimization Algorithm", arXiv 2206.09576.

    x    global model x_k                        alpha     client step
    v    weighted mean of the local models       tau       local steps (their weighted mean if clients differ)
    g    (x_k - v_k) / (alpha tau)               eta       server step
    s    x_k - x_{k-1}                           lam, Lam  bounds of the curvature ||y||^2 / y^T s
    y    g_k - g_{k-1}                           R         B is reset to I whenever k mod R = 0
    B    estimate of the Hessian, B_1 = I        r         radius of the guard

Clients are FedAvg's, unchanged. guard="none" is the paper's Algorithm 1. guard="adaptive" adds a trust radius
that looks back along the last step: theta = g_k^T s / -g_{k-1}^T s is the share of the slope that is left
(0: ideal; theta > 0.8: overshot, the radius shrinks; theta < -0.1: still downhill, it grows if it had bound).
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from .. import local as solver
from .. import quasi_newton as qn
from ..algorithm import Algorithm, Cohort, Local, Objective, Reply
from ..checks import at_least, positive
from ..errors import InputError, unknown
from ..schedule import Step, at
from ..tree import Scalar, Tree, gram, hyper, param

log = logging.getLogger("fedsso")
GUARDS = ("adaptive", "none")


class Guard(NamedTuple):
    """The trust region, all [trials, 1]."""

    radius: Tensor
    slope: Tensor  # -g_{k-1}^T s of the last step
    capped: Tensor  # whether the last step was cut to the radius


class State(NamedTuple):
    """Server state."""

    x: Tensor  # [trials, d]
    g: Tensor  # g of the last round
    s: Tensor  # last step
    curvature: Tree
    guard: Guard
    seen: Tensor  # [trials, 4]: y^T s, overridden, skipped, ||g|| of the last round


@hyper
class FedSSO(Algorithm):
    """Server-side BFGS on averaged gradients.

    >>> FedSSO(alpha=0.001, guard="none", R=200).eta
    1.0
    """

    alpha: Step = param(default=0.01, doc="client step α")
    eta: Step = param(default=1.0, doc="server step η")
    R: int | None = param(default=None, doc="rounds between resets of B; none: never (the paper: 200)")
    lam: Scalar = param(default=1e-4, doc="lower bound λ of the curvature")
    Lam: Scalar = param(default=9999.0, doc="upper bound Λ of the curvature")
    form: str = param(default="bfgs", doc="bfgs, bfgs-dense, dfp, dfp-dense or lbfgs")
    guard: str = param(default="adaptive", doc="adaptive: step radius and noise test; none: the paper's Algorithm 1")
    pairs: int = param(default=200, doc="pairs (s, y) held; beyond it the oldest leaves")
    m: int = param(default=20, doc="window of form lbfgs")

    def __post_init__(self) -> None:
        _check(self)

    def server_init(self, x: Tensor) -> State:
        one = x.new_zeros(x.shape[0], 1, dtype=torch.float64)
        zero = x.new_zeros(x.shape)
        seen = one.expand(-1, 4).contiguous()
        return State(x, zero, zero, _form(self, x, 0).init(x), Guard(one, one, one.bool()), seen)

    def client(self, f: Objective, x: Tensor, own: tuple[()], local: Local) -> Reply:
        delta, loss = solver.sgd(f, x, local, at(self.alpha, local.k))  # Alg. 1, lines 4-8
        return Reply(delta, own, loss)

    def server(self, server: State, delta: Tensor, cohort: Cohort) -> State:
        k, x, s = cohort.k, server.x, server.s
        work = at(self.alpha, k) * cohort.steps
        g = delta / -work  # Alg. 1, line 11
        y = g - server.g  # line 12; in round 1 s = 0, so no pair enters
        products, form = gram(s, y, g), _form(self, x, k)
        adaptive = self.guard == "adaptive"
        pair = qn.judge(products, self.lam, self.Lam, dual=form.dual, cosine=0.1 if adaptive else 0.0)
        reset = self.R is not None and k % self.R == 0
        curvature, direction = form.step(server.curvature, s, y, g, pair, k, reset)  # line 13
        slope, length = torch.split(gram(g, direction)[..., 1], 1, -1)  # g^T B^-1 g, ||B^-1 g||^2
        guard, step = server.guard, at(self.eta, k) * torch.ones_like(slope)
        if adaptive:
            guard, step = _cap(guard, products, work, step, length.sqrt())
        move = direction.mul_(-step.to(x.dtype))
        new = x + move  # line 14
        s = torch.sub(new, x, out=move)  # after rounding, as the clients see it
        return State(new, g, s, curvature, guard._replace(slope=step * slope), _seen(pair, reset, products))

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        names = ("ys", "overridden", "skipped", "grad_norm")
        radius = server.guard.radius[:, 0] if self.guard == "adaptive" else server.seen[:, 0] * torch.nan
        return {**dict(zip(names, server.seen.unbind(-1), strict=True)), "radius": radius}


def _check(record: FedSSO) -> None:
    """Refuse values that the algorithm cannot work with."""
    positive(record, "alpha", "eta")
    positive(record, "lam", "Lam", schedules=False)
    if record.lam >= record.Lam:
        raise InputError(f"lam must be < Lam, got lam={record.lam}, Lam={record.Lam}; the paper: 1e-4 and 9999")
    at_least(record, "R", 2, none=True)
    at_least(record, "pairs", 1, most=10_000)
    at_least(record, "m", 1, most=10_000)
    if record.guard not in GUARDS:
        raise unknown("guard", record.guard, GUARDS)
    qn.form(record.form, record.pairs, record.m)


def _cap(guard: Guard, products: Tensor, work: Scalar, step: Tensor, length: Tensor) -> tuple[Guard, Tensor]:
    """Adapt the radius to g_k^T s, the slope found at the end of the last step, and cut the new step to it."""
    uphill, size = products[..., 0, 2:], products[..., 2, 2:].sqrt()  # g^T s and ||g||
    r = torch.where(guard.radius > 0, guard.radius, work * size)  # at first the FedAvg step
    theta = uphill / guard.slope  # NaN before the first step: both tests are then false
    r = torch.where(theta > 0.8, 0.7 * r, r)
    r = torch.where((theta < -0.1) & guard.capped, 2 * r, r)
    capped = step * length > r
    return guard._replace(radius=r, capped=capped), torch.where(capped, r / length, step)


def _seen(pair: qn.Verdict, reset: bool, products: Tensor) -> Tensor:
    """What the trace tells of the round; a pair that a reset drops counts neither as overridden nor as skipped."""
    judged = not reset
    return torch.cat([pair.rho, pair.overridden & judged, pair.skipped & judged, products[..., 2, 2:].sqrt()], -1)


def _form(record: FedSSO, x: Tensor, k: int) -> qn.Form:
    """The form with as many pairs as fit into the memory of one trial; the log tells where that shows."""
    windows = {"lbfgs": min(record.m, record.pairs), "bfgs-dense": 0, "dfp-dense": 0}
    wished = windows.get(record.form, record.pairs)
    held = qn.capacity(record.form, wished, x.shape[-1], x.element_size()) if wished else 0
    if k == 0 and held < wished and not x.is_meta:
        log.warning("%d pairs of %d numbers exceed 2 GB: %d are held", wished, x.shape[-1], held)
    if k == held + 2 and (record.R is None or k < record.R) and record.form in ("bfgs", "dfp"):
        log.info("round %d: %d pairs are held at most, from now on the oldest leaves", k, held)
    return qn.form(record.form, max(1, held), max(1, held))
