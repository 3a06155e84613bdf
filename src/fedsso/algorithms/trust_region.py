"""PLACEHOLDER DOC

"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor

from ..support.linalg import gram
from ..support.trees import Scalar

TRUSTED = 0.3  # cosine of s and y from which on y is taken as it is
AGREEMENT = float(os.environ.get("RHO", "0.4"))
GROWTH = float(os.environ.get("GROW", "10"))
SHRINK = 0.5
FLATTEST = float(os.environ.get("FLAT", "1000"))  # the largest gamma
TINY = 1e-300  # stands for a direction of length 0


class Guard(NamedTuple):
    """The trust region and what the server remembers of its last step; all [trials, 1]."""

    radius: Tensor  # r; 0 before the first round
    gamma: Tensor  # B starts from I / (gamma work), in form bfgs
    slope: Tensor  # -g_{k-1}^T s; 0 if there was no step
    share: Tensor  # B s = -share g_{k-1}
    capped: Tensor  # whether it was cut to the radius


def start(x: Tensor) -> Guard:
    """The guard before the first step from the models x [trials, d]."""
    zero = x.new_zeros(x.shape[0], 1, dtype=torch.float64)
    one = zero.new_ones(zero.shape)
    return Guard(radius=zero, gamma=one, slope=zero, share=zero, capped=zero.bool())


def adapt(
    guard: Guard,
    products: Tensor,
    work: Scalar,
    rounds: Tensor,
) -> Guard:
    """New radius and gamma, after a look back along the last step."""
    sg = products[..., 0, 2:]
    gy = products[..., 1, 2:]
    yy = products[..., 1, 1:2]
    gg = products[..., 2, 2:]
    old = (gg - 2 * gy + yy).clamp(min=0)  # |g_{k-1}|^2
    moved = guard.slope > 0
    fedavg = work * gg.sqrt()
    radius = torch.where(guard.radius > 0, guard.radius, fedavg)
    agreement = torch.where(moved, -sg / guard.slope, AGREEMENT)
    if os.environ.get("COSINE", "1") == "1":
        agreement = agreement * (old / gg).sqrt().clamp(max=1).nan_to_num(1.0)
    growth = torch.full_like(agreement, GROWTH)
    if os.environ.get("LATE"):
        growth = torch.where(rounds > 4, float(os.environ["LATE"]), growth)
    rest = (1 - agreement).clamp(min=TINY)
    m = torch.minimum((1 - AGREEMENT) / rest, growth).clamp(min=SHRINK)
    m = torch.where(moved, m, 1.0)
    radius = torch.where((m < 1) | guard.capped, m * radius, radius)
    radius = torch.maximum(radius, fedavg)
    factor = torch.where(guard.capped, 1.0, m)
    gamma = (factor * guard.gamma).clamp(1, FLATTEST)
    return guard._replace(radius=radius, gamma=gamma)


def damp(
    y: Tensor,
    old: Tensor,
    products: Tensor,
    guard: Guard,
) -> Tensor:
    ss = products[..., 0, :1]
    sy = products[..., 0, 1:2]
    yy = products[..., 1, 1:2]
    phi = (sy / (TRUSTED * (ss * yy).sqrt())).clamp(0, 1).nan_to_num(0.0) * (guard.slope > 0)
    rest = torch.where(phi > 0, (1 - phi) * guard.share, 0.0)  # (1 - phi) B s = -rest g_{k-1}
    return y.mul_(phi.to(y.dtype)).sub_(rest.to(y.dtype) * old)


def step(
    guard: Guard,
    eta: Scalar,
    work: Scalar,
    g: Tensor,
    direction: Tensor,
) -> tuple[Tensor, Guard]:
    """The step [trials, d], and the guard that remembers it."""
    inner = gram(g, direction)
    gg = inner[..., 0, :1] * work * work
    gn = inner[..., 0, 1:] * work
    nn = inner[..., 1, 1:]
    one = torch.ones_like(gg)
    # the part b of the way from u to n at which the step is as long as the radius
    way = (nn - 2 * gn + gg).clamp(min=TINY)
    ahead = gn - gg
    root = (ahead * ahead + way * (guard.radius**2 - gg)).clamp(min=0).sqrt()
    b = ((root - ahead) / way).clamp(0, 1)
    fits = nn.sqrt() <= guard.radius
    b = torch.where(fits, one, b)
    near = (eta * b).to(g.dtype)
    far = (eta * (1 - b) * work * one).to(g.dtype)
    move = direction.mul_(-near).sub_(far * g)
    slope = eta * (b * gn + (1 - b) * gg) / work
    return move, guard._replace(slope=slope, share=eta * one, capped=~fits)
