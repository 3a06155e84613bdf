"""Work that clients of several algorithms share: local SGD, full passes over their rows, conjugate
gradients, Newton.

Points are [M, trials, d], or [trials, d] where all clients start from the server's model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..support.linalg import dot
from ..support.trees import Scalar
from .contract import Local, Objective

Correction = Callable[[Tensor], Tensor]
Product = Callable[[Tensor], Tensor]
BACKTRACKING = tuple(0.5**j for j in range(10))  # 1, 1/2, ..., 2^-9


def sgd(
    f: Objective, x: Tensor, local: Local, alpha: Scalar, correction: Correction | None = None
) -> tuple[Tensor, Tensor]:
    """Local SGD from the global model x: the update x_tau - x [M, trials, d] and the mean
    mini-batch loss [M, trials].

    The difference is carried instead of the model: at alpha = 1e-4 a float32 model would drown its
    own update in rounding. `correction` adds a term to every gradient, given the update so far.
    Step j acts only on clients that still have a step to do.
    """
    delta = x.new_zeros(local.own_steps.shape[0], *x.shape[-2:])
    point, grad = (
        torch.empty_like(delta),
        torch.empty_like(delta),
    )  # fresh ones in each step cost page faults
    rate = torch.as_tensor(alpha, dtype=x.dtype, device=x.device)
    total = x.new_zeros(())
    for j in range(local.steps):
        loss, g = f.value_and_grad(torch.add(x, delta, out=point), local.batch(j), out=grad)
        if correction is not None:
            g = g + correction(delta)
        active = local.active(j)
        delta.addcmul_(g, rate if active is None else rate * active, value=-1)
        total = total + (loss if active is None else loss * active[..., 0])
    return delta, total / local.own_steps[..., 0]


# ---- full passes over the clients' rows ----


def at_clients(x: Tensor, local: Local) -> Tensor:
    """The server's model x [trials, d] as the same point at every client."""
    return x.expand(local.own_steps.shape[0], *x.shape[-2:])


def gradient(f: Objective, x: Tensor, local: Local) -> tuple[Tensor, Tensor]:
    """f_i(x) [M, trials] and its gradient [M, trials, d]."""
    x = at_clients(x, local)
    parts = [f.value_and_grad(x, piece) for piece in local.full()]
    return sum((v for v, _ in parts[1:]), parts[0][0]), sum((g for _, g in parts[1:]), parts[0][1])


def value(f: Objective, x: Tensor, local: Local) -> Tensor:
    """f_i(x) [M, trials]."""
    x = at_clients(x, local)
    parts = [f.value(x, piece) for piece in local.full()]
    return sum(parts[1:], parts[0])


def hessian(f: Objective, x: Tensor, local: Local) -> Tensor:
    """The Hessian of f_i at x, [M, trials, d, d]."""
    x = at_clients(x, local)
    pieces = local.full()
    total = f.hessian(x, next(pieces))
    for piece in pieces:
        total += f.hessian(x, piece)
    return total


def curvature(f: Objective, x: Tensor, local: Local) -> Product:
    """The function v -> (Hessian of f_i at x) v."""
    x = at_clients(x, local)

    def product(v: Tensor) -> Tensor:
        parts = [f.hvp(x, v, piece) for piece in local.full()]
        return sum(parts[1:], parts[0])

    return product


# ---- solvers ----


def cg(product: Product, b: Tensor, steps: int, tol: float) -> Tensor:
    """Conjugate gradients for A z = b from z = 0, each client and trial on its own.

    One ends when its residual has shrunk to `tol` times its first length, or where v^T A v <= 0:
    then with the point before, or b itself in the first step.
    """
    z, r, v = torch.zeros_like(b), b, b
    rr = first = dot(r, r)
    for j in range(steps):
        Av = product(v)
        vAv = dot(v, Av)
        going = (rr > 0) & (vAv > 0)
        a = torch.where(going, rr / vAv, 0 * vAv).to(b.dtype)  # NaN stays NaN
        z = z + a * v if j else torch.where(vAv <= 0, b, a * v)
        r = r - a * Av
        new = dot(r, r)
        v = r + torch.where(going, new / rr, 0.0).to(b.dtype) * v
        rr = torch.where(going & (new > tol**2 * first), new, 0.0)  # 0 marks who has ended
        if b.is_meta or not rr.any():
            break
    return z


class Solver(NamedTuple):
    """How precisely a client solves its systems."""

    newton: int  # Newton steps
    cg: int  # conjugate-gradient steps in each
    tol: float  # relative residual at which these end


def newton(
    f: Objective, x: Tensor, local: Local, solver: Solver, tilt: Tensor | None, mu: Scalar
) -> Tensor:
    """Minimise f_i(y) + <tilt, y - x> + mu/2 |y - x|^2 by Newton's method; the update y - x [M,
    trials, d].

    Each step is the largest of 1, 1/2, ..., 2^-9 that lowers the client's own objective enough.
    """
    x = at_clients(x, local)
    delta = torch.zeros_like(x)
    shift = torch.zeros_like(x) if tilt is None else tilt

    def total(loss: Tensor, delta: Tensor) -> Tensor:
        return loss.unsqueeze(-1).double() + dot(shift, delta) + mu * dot(delta, delta) / 2

    for _ in range(solver.newton):
        loss, g = gradient(f, x + delta, local)
        g = g + shift + mu * delta
        H = curvature(f, x + delta, local)
        p = cg(lambda v, H=H: H(v) + mu * v, -g, solver.cg, solver.tol)  # type: ignore[misc]
        losses = zip(along(f, x + delta, p, local).unbind(-1), BACKTRACKING, strict=True)
        tried = torch.cat([total(loss_t, delta + t * p) for loss_t, t in losses], -1)
        t = armijo(tried.to(x.dtype), total(loss, delta), dot(g, p), 0.1)
        delta = delta + t.to(x.dtype) * p
    return delta


# ---- line search: the steps are fixed, so it is one exchange ----


def along(f: Objective, x: Tensor, p: Tensor, local: Local) -> Tensor:
    """f_i(x + t p) at the ten steps t, [M, trials, 10]."""
    x, p = at_clients(x, local), at_clients(p, local)
    parts = [
        torch.stack([f.value(x + t * p, piece) for t in BACKTRACKING], -1) for piece in local.full()
    ]
    return sum(parts[1:], parts[0])


def armijo(losses: Tensor, f0: Tensor, slope: Tensor, c: float, last: Scalar = 1.0) -> Tensor:
    """The largest of the ten steps with f(x + t p) <= f(x) + c t g^T p; where none has, the one of
    the lowest loss if that is below f(x), else 0.

    losses [..., 10], f0, slope and last [..., 1]; the step [..., 1] in float64. Near a minimum,
    where the losses differ by their rounding alone, they cannot choose: then `last`, the step of
    the round before, is taken.
    """
    t = torch.tensor(BACKTRACKING, dtype=torch.float64, device=losses.device)
    fits = losses <= f0 + c * t * slope.clamp(max=0)  # where p leads uphill, f must not rise
    best, where = losses.nan_to_num(torch.inf).min(-1, keepdim=True)
    first = fits.to(torch.uint8).argmax(-1, keepdim=True)
    chosen = torch.where(
        fits.any(-1, keepdim=True), t[first], torch.where(best < f0, t[where], 0.0)
    )
    blind = (losses - f0).abs().amax(-1, keepdim=True) <= 16 * torch.finfo(
        losses.dtype
    ).eps * f0.abs()
    return torch.where(blind, last, chosen)
