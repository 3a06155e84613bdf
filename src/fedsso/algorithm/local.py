"""Work that clients of several algorithms share.

    sgd                                   local SGD steps on mini-batches
    gradient, value, hessian, curvature   full passes over all rows of the clients
    cg, newton                            conjugate gradients, Newton's method
    along, armijo                         a line search that takes one exchange

Points are [M, trials, d] for M clients, or [trials, d] where all clients start from the server's
model. Every client and every trial is computed on its own, all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..support.linalg import dot
from ..support.trees import Scalar
from .client_optimizer import Memory
from .contract import Local, Objective

Correction = Callable[[Tensor], Tensor]
Product = Callable[[Tensor], Tensor]
BACKTRACKING = tuple(0.5**j for j in range(10))  # 1, 1/2, ..., 2^-9
ENOUGH = 0.1  # Armijo's c in Newton's method: the share of the promised decrease that is enough
ROUNDING = 16  # losses that differ by so many units in the last place cannot choose a step


def sgd(
    f: Objective,
    x: Tensor,
    local: Local,
    alpha: Scalar,
    correction: Correction | None = None,
) -> tuple[Tensor, Tensor]:
    """Local SGD from the global model: y <- y - alpha (gradient at y + correction).

    Args:
        f: The clients' losses.
        x: Where all clients start, [trials, d], or where each starts, [M, trials, d].
        local: Mini-batches and numbers of steps of the M clients.
        alpha: The step size, a number or [trials, 1].
        correction: Given the update so far [M, trials, d], a term that is added to the gradient:
            mu times the update for a proximal term, a constant for a control variate.

    Returns:
        The update x_tau - x [M, trials, d] and the mean loss of the mini-batches [M, trials].

    A client that has done all its steps stays where it is. If `local.optimizer` is not plain SGD,
    its direction takes the place of the gradient.

    The difference to x is carried, not the model: at alpha = 1e-4 a float32 model would lose its
    own update to rounding.
    """
    delta = x.new_zeros(local.own_steps.shape[0], *x.shape[-2:])
    point = torch.empty_like(delta)  # fresh tensors in each step would cost page faults
    grad = torch.empty_like(delta)
    rate = torch.as_tensor(alpha, dtype=x.dtype, device=x.device)
    # A number: the first addition gives it the shape [M, trials].
    total = x.new_zeros(())
    memory = None if local.optimizer.is_plain else Memory(local.optimizer, delta)
    for j in range(local.steps):
        torch.add(x, delta, out=point)
        loss, g = f.value_and_grad(point, local.batch(j), out=grad)
        if correction is not None:
            g = g + correction(delta)
        if memory is not None:
            g = memory.direction(g, point, j)
        active = local.active(j)
        delta.addcmul_(g, rate if active is None else rate * active, value=-1)
        total = total + (loss if active is None else loss * active[..., 0])
    return delta, total / local.own_steps[..., 0]


# ---- full passes over the clients' rows, piece by piece ----


def at_clients(x: Tensor, local: Local) -> Tensor:
    """The server's model x [trials, d] as the same point at every client, [M, trials, d]."""
    return x.expand(local.own_steps.shape[0], *x.shape[-2:])


def gradient(
    f: Objective,
    x: Tensor,
    local: Local,
) -> tuple[Tensor, Tensor]:
    """f_i(x) [M, trials] and its gradient [M, trials, d], over all rows of each client."""
    x = at_clients(x, local)
    values = []
    gradients = []
    for piece in local.full():
        v, g = f.value_and_grad(x, piece)
        values.append(v)
        gradients.append(g)
    return _sum(values), _sum(gradients)


def value(
    f: Objective,
    x: Tensor,
    local: Local,
) -> Tensor:
    """f_i(x) [M, trials], over all rows of each client."""
    x = at_clients(x, local)
    return _sum(f.value(x, piece) for piece in local.full())


def hessian(
    f: Objective,
    x: Tensor,
    local: Local,
) -> Tensor:
    """The Hessian of f_i at x, [M, trials, d, d], over all rows of each client.

    The pieces are added in place, since two matrices of this size may not fit.
    """
    x = at_clients(x, local)
    pieces = local.full()
    total = f.hessian(x, next(pieces))
    for piece in pieces:
        total += f.hessian(x, piece)
    return total


def curvature(
    f: Objective,
    x: Tensor,
    local: Local,
) -> Product:
    """The function v -> (Hessian of f_i at x) v, for v [M, trials, d].

    Each call is a pass over all rows of the clients. No matrix is made.
    """
    x = at_clients(x, local)

    def product(v: Tensor) -> Tensor:
        return _sum(f.hvp(x, v, piece) for piece in local.full())

    return product


def _sum(parts: Iterable[Tensor]) -> Tensor:
    """The sum of one tensor or more, in order, so that it is the same in every run."""
    first, *others = parts
    return sum(others, first)


# ---- solvers ----


def cg(
    product: Product,
    b: Tensor,
    steps: int,
    tol: float,
) -> Tensor:
    """Conjugate gradients for A z = b from z = 0, given v -> A v.

    Args:
        product: v -> A v for v [M, trials, d], with a symmetric A for each client and trial.
        b: [M, trials, d].
        steps: The most products.
        tol: A client ends when its residual has shrunk to `tol` times its first length.

    Returns:
        z [M, trials, d]; NaN where b holds NaN.

    A client also ends where it finds a direction v with v^T A v <= 0, along which A has no
    minimum. Then it keeps the point before; in the first step, b itself. So for b = -g it always
    gets a direction of descent. All clients and trials run together until the last one ends.
    """
    z = torch.zeros_like(b)
    r = b
    v = b
    rr = first = dot(r, r)
    for j in range(steps):
        Av = product(v)
        vAv = dot(v, Av)
        going = (rr > 0) & (vAv > 0)
        a = torch.where(going, rr / vAv, 0 * vAv).to(b.dtype)  # NaN stays NaN
        # In the first step v is b: without positive curvature b itself is the answer.
        z = z + a * v if j else torch.where(vAv <= 0, b, a * v)
        r = r - a * Av
        new = dot(r, r)
        v = r + torch.where(going, new / rr, 0.0).to(b.dtype) * v
        rr = torch.where(going & (new > tol**2 * first), new, 0.0)  # 0 marks who has ended
        # A tensor without numbers, by which costs are measured, cannot tell when it ends.
        if b.is_meta or not rr.any():
            break
    return z


class Solver(NamedTuple):
    """How precisely a client solves its systems."""

    newton: int  # Newton steps
    cg: int  # conjugate-gradient steps in each
    tol: float  # relative residual at which these end


def newton(
    f: Objective,
    x: Tensor,
    local: Local,
    solver: Solver,
    tilt: Tensor | None,
    mu: Scalar,
) -> Tensor:
    """Minimise f_i(y) + <tilt, y - x> + mu/2 |y - x|^2 by Newton's method.

    Args:
        f: The clients' losses, over all rows.
        x: The global model [trials, d], where each client starts.
        local: The rows of the M clients.
        solver: How many steps, and how precise.
        tilt: A linear term [M, trials, d]; None: none.
        mu: Strength of the proximal term, a number or [trials, 1].

    Returns:
        The update y - x [M, trials, d].

    Each step is the largest of 1, 1/2, ..., 2^-9 times Newton's direction that lowers the
    client's own objective enough.
    """
    x = at_clients(x, local)
    delta = torch.zeros_like(x)
    shift = torch.zeros_like(x) if tilt is None else tilt

    def total(loss: Tensor, delta: Tensor) -> Tensor:
        """The objective at x + delta from f_i there [M, trials]; [M, trials, 1] in float64."""
        return loss.unsqueeze(-1).double() + dot(shift, delta) + mu * dot(delta, delta) / 2

    for _ in range(solver.newton):
        y = x + delta
        loss, g = gradient(f, y, local)
        g = g + shift + mu * delta
        damped = _damped(curvature(f, y, local), mu)
        p = cg(damped, -g, solver.cg, solver.tol)
        losses = along(f, y, p, local).unbind(-1)
        tried = []
        for step, loss_there in zip(BACKTRACKING, losses, strict=True):
            tried.append(total(loss_there, delta + step * p))
        totals = torch.cat(tried, -1).to(x.dtype)
        t = armijo(totals, total(loss, delta), dot(g, p), ENOUGH)
        delta = delta + t.to(x.dtype) * p
    return delta


def _damped(H: Product, mu: Scalar) -> Product:
    """The function v -> (H + mu I) v."""

    def product(v: Tensor) -> Tensor:
        return H(v) + mu * v

    return product


# ---- line search: the steps are fixed, so that it takes one exchange ----


def along(
    f: Objective,
    x: Tensor,
    p: Tensor,
    local: Local,
) -> Tensor:
    """f_i(x + t p) at the ten steps t = 1, 1/2, ..., 2^-9, [M, trials, 10].

    x and p are [trials, d] or [M, trials, d]. All steps are computed on a piece of rows before
    the next piece is gathered.
    """
    x = at_clients(x, local)
    p = at_clients(p, local)
    parts = []
    for piece in local.full():
        losses = [f.value(x + t * p, piece) for t in BACKTRACKING]
        parts.append(torch.stack(losses, -1))
    return _sum(parts)


def armijo(
    losses: Tensor,
    f0: Tensor,
    slope: Tensor,
    c: float,
    last: Scalar = 1.0,
) -> Tensor:
    """The largest of the ten steps t that lowers f enough: f(x + t p) <= f(x) + c t g^T p.

    Where none does, it is the step of the lowest loss if that is below f(x), else 0.

    `losses` [..., 10] are f at the ten steps; f0 = f(x), slope = g^T p and last are [..., 1]. The
    step is [..., 1] in float64. Near a minimum, where the losses differ by rounding alone, they
    cannot choose: then `last`, the step of the round before, is taken.
    """
    t = torch.tensor(BACKTRACKING, dtype=torch.float64, device=losses.device)
    fits = losses <= f0 + c * t * slope.clamp(max=0)  # where p leads uphill, f must not rise
    best, where = losses.nan_to_num(torch.inf).min(-1, keepdim=True)
    fallback = torch.where(best < f0, t[where], 0.0)
    first = fits.to(torch.uint8).argmax(-1, keepdim=True)
    chosen = torch.where(fits.any(-1, keepdim=True), t[first], fallback)
    rounding = ROUNDING * torch.finfo(losses.dtype).eps * f0.abs()
    blind = (losses - f0).abs().amax(-1, keepdim=True) <= rounding
    return torch.where(blind, last, chosen)
