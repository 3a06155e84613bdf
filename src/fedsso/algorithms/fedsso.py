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
        positive(self, "alpha", "eta")
        positive(self, "lam", "Lam", schedules=False)
        if self.lam >= self.Lam:
            raise InputError(f"lam must be < Lam, got lam={self.lam}, Lam={self.Lam}; the paper: 1e-4 and 9999")
        at_least(self, "R", 2, none=True)
        at_least(self, "pairs", 1)
        at_least(self, "m", 1)
        if self.guard not in GUARDS:
            raise unknown("guard", self.guard, GUARDS)
        qn.form(self.form, self.pairs, self.m)

    def server_init(self, x: Tensor) -> State:
        held, wished = self._held(x), self._wished
        if held < wished and not x.is_meta:
            log.warning("%d pairs of %d numbers exceed 2 GB: %d are held", wished, x.shape[-1], held)
        one = x.new_zeros(x.shape[0], 1, dtype=torch.float64)
        guard = Guard(one, one, one.bool())
        zero = x.new_zeros(x.shape)
        return State(x, zero, zero, self._form(x).init(x), guard, one.expand(-1, 4).contiguous())

    def client(self, f: Objective, x: Tensor, own: tuple[()], local: Local) -> Reply:
        delta, loss = solver.sgd(f, x, local, at(self.alpha, local.k))  # Alg. 1, lines 4-8
        return Reply(delta, own, loss)

    def server(self, server: State, delta: Tensor, cohort: Cohort) -> State:
        k, x, s = cohort.k, server.x, server.s
        form = self._form(x)
        if k == self._held(x) + 2 and (self.R is None or k < self.R) and self.form in ("bfgs", "dfp"):
            log.info("round %d: %d pairs are held at most, from now on the oldest leaves", k, k - 2)
        work = at(self.alpha, k) * cohort.steps
        g = delta / -work  # Alg. 1, line 11
        y = g - server.g  # line 12; in round 1 s = 0, so no pair enters
        products = gram(s, y, g)
        pair = qn.judge(products, self.lam, self.Lam, dual=form.dual, cosine=0.1 if self.guard == "adaptive" else 0.0)
        reset = self.R is not None and k % self.R == 0
        curvature, direction = form.step(server.curvature, s, y, g, pair, k, reset)  # line 13
        slope, length = torch.split(gram(g, direction)[..., 1], 1, -1)  # g^T B^-1 g, ||B^-1 g||^2
        guard, step = server.guard, at(self.eta, k) * torch.ones_like(slope)
        size = products[..., 2, 2:].sqrt()  # ||g||
        if self.guard == "adaptive":
            radius = torch.where(guard.radius > 0, guard.radius, work * size)  # at first the FedAvg step
            guard, step = self._cap(guard._replace(radius=radius), products[..., 0, 2:], step, length.sqrt())
        move = direction.mul_(-step.to(x.dtype))
        new = x + move  # line 14
        judged = not reset
        seen = torch.cat([pair.rho, pair.overridden & judged, pair.skipped & judged, size], -1)
        s = torch.sub(new, x, out=move)  # after rounding, as the clients see it
        return State(new, g, s, curvature, guard._replace(slope=step * slope), seen)

    @staticmethod
    def _cap(guard: Guard, uphill: Tensor, step: Tensor, length: Tensor) -> tuple[Guard, Tensor]:
        """Adapt the radius to g_k^T s, the slope found at the end of the last step, and cut the new step to it."""
        theta, r = uphill / guard.slope, guard.radius  # theta is NaN before the first step: both tests are then false
        r = torch.where(theta > 0.8, 0.7 * r, r)
        r = torch.where((theta < -0.1) & guard.capped, 2 * r, r)
        capped = step * length > r
        return guard._replace(radius=r, capped=capped), torch.where(capped, r / length, step)

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        names = ("ys", "overridden", "skipped", "grad_norm")
        radius = server.guard.radius[:, 0] if self.guard == "adaptive" else server.seen[:, 0] * torch.nan
        return {**dict(zip(names, server.seen.unbind(-1), strict=True)), "radius": radius}

    @property
    def _wished(self) -> int:
        """Pairs that the form wants to keep."""
        return {"lbfgs": min(self.m, self.pairs), "bfgs-dense": 0, "dfp-dense": 0}.get(self.form, self.pairs)

    def _held(self, x: Tensor) -> int:
        """Pairs that are kept: no more than fit into the memory of one trial."""
        return qn.capacity(self.form, self._wished, x.shape[-1], x.element_size()) if self._wished else 0

    def _form(self, x: Tensor) -> qn.Form:
        held = max(1, self._held(x))
        return qn.form(self.form, held, held)
