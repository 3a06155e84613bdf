"""The guard of FedSSO for clients of which nothing is known: guard="cautious".

FedSSO takes u = x_k - v_k, what the clients' mean moved, for a multiple of a gradient. It is one if
clients take a few small steps of plain SGD. Clients may do other things: whole epochs, large steps,
momentum, Adam, other work at each client. Then u is still what FedAvg steps by, and a step that
helped, but no gradient. This guard asks nothing about the clients. Its steps begin at FedAvg's
model v_k and go beyond it only as far as successive updates agree. The symbols are those of
`fedsso.py`; `work` is alpha tau, so that u = work g. All rules stay the same if g is multiplied by
a constant, so that nobody need know alpha or tau.

The step. n = B^-1 g is the quasi-Newton step. The server goes from v_k towards x_k - n:

    x_{k+1} = x_k - (1 - b) u - b n

with b = 1 if n is not longer than the radius r, else

    b = (r - |u|) / (|n| - |u|)

The radius is never smaller than |u|, so that 0 <= b <= 1. The step is at most (1 - b) |u| + b |n|
long, which is r; it is that long if u and n point the same way. Where r = |u| and n is longer, the
step is FedAvg's in length and direction. The largest b with a step no longer than r would not do:
if n turns away from u, that b is above 0 even where r = |u|, and the server would leave FedAvg's
direction in rounds in which the updates gave no reason to go beyond FedAvg's model. An n that is
not longer than r is taken as it is, also where it is shorter than u. A step that is FedAvg's but
for rounding is replaced by FedAvg's own numbers: clients with large steps amplify rounding until
the two runs differ, and a server that only averages should be FedAvg to the bit.
Where a memory makes up for absent clients (`memory.py`), u is the corrected update, and "FedAvg"
means FedAvg with this update.

The bound. The radius is never larger than 5 |u|, unless some |u| since B began was longer: then it
may be as large as the longest. Updates may drift in one direction for good, whatever becomes of the
loss. Without this bound agreement alone took the server 115 times as far as FedAvg, with Adam on
a9a, and the accuracy fell within one round from 0.85 to 0.28. Where updates are gradients they
become short, and the quasi-Newton step does not: it may be as long as steps have already been.

Agreement. Looking back at the last step s, the server compares the slopes along s:

    a = (g_k^T s) / (g_{k-1}^T s)  min(1, |g_{k-1}| / |g_k|)

a = 1 means that the update still points the same way with the same strength, a = 0 that the step
has used up all that it promised, or that updates are mostly noise. Where the server wants the
agreement w, the last step should have been m times as long:

    m = (1 - w) / (1 - a),    within 1/2 <= m <= 5

Radius r and gamma, which says how flat B starts (from I / (gamma work)), are multiplied by m as in
`trust_region.py`: r if the last step was cut to it or if m < 1, gamma if it was not cut.

What agreement is wanted. If u were a gradient, w = 0 would be right: the step to the lowest point.
But updates of Adam keep their length when a minimum is near, and those of long local training point
to each client's own minimum: both tell too late that a step is too long. And a noisy u points
elsewhere in every round. In all these cases updates do not become shorter. So the server looks at
q, how long updates are beside those of the round before (a geometric mean, in which the newest
ratio counts half, the one before a quarter, and so on):

    w = 0.6 (q - 0.5) / (0.9 - 0.5),    within 0 <= w <= 0.6

Updates that are halved in a round are gradients, and w = 0; updates that keep their length are not
trusted further than 0.6, which means steps of 0.4 times the length that their slopes promise. Both
numbers come from clients with SGD, momentum and Adam on two tasks, and were tried on a third
(docs/flower.md).

The net. A step beyond FedAvg's has misled the server if in the next round

- the clients' mean loss is higher than in each of the five rounds before, by more than these
  differ among themselves and by more than 5 %, or is not finite (on Flower also where evaluation
  finds the model worse than the five before it, by 5 %), or
- the update is ten times as long as the one before.

The server then goes back to FedAvg's model of the round with the lowest loss (of the last round,
where clients report no loss), forgets B, and begins anew: radius and stretch are 0 in the trace of
that round, and the loss counts again once five rounds are known. After three times it only
averages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..support.linalg import gram
from ..support.trees import Scalar
from .trust_region import TINY, Guard

WANTED = 0.6  # the agreement after a step of the right length, if updates keep their length
STEADY = 0.9  # what an update that keeps its length is at least of the one before
HALVED = 0.5  # from which on updates shrink as gradients do
SHRINK = 0.5  # the smallest m
STRETCH = 5.0  # the longest step, in lengths of this round's update, and the largest m
FLATTEST = 100  # the largest gamma
WINDOW = 5  # rounds that a loss is compared with
JUMP = 10.0  # how much longer an update may be than the one before
NOTICED = 0.05  # the least rise of a loss that counts, as a share of it
BEYOND = 1.01  # the stretch from which on a step goes beyond FedAvg's, and not by rounding
ROUNDING = 1e-6  # what rounding may add to a length
OPERATIONS = 8  # that round, between a mean update and a step, at most
PATIENCE = 3  # how often the server is misled before it only averages


class Net(NamedTuple):
    """What the server needs to go back; all [trials, ...]."""

    losses: Tensor  # [trials, WINDOW]: the last losses, newest last; infinite before the first
    lowest: Tensor  # [trials, 1]: the lowest loss since B began
    model: Tensor  # [trials, d]: FedAvg's model of that round
    falls: Tensor  # [trials, 1]: how often the server went back
    stretch: Tensor  # [trials, 1]: the length of the last step, in lengths of FedAvg's
    trend: Tensor  # [trials, 1]: mean of log(|g_k| / |g_{k-1}|), the newest counting half
    longest: Tensor  # [trials, 1]: the length of FedAvg's longest step since B began


def start(x: Tensor, *, used: bool) -> Net:
    """The net before the first round from the models x [trials, d].

    With another guard it is not used, and takes no memory.
    """
    zero = x.new_zeros(x.shape[0], 1, dtype=torch.float64)
    endless = zero.new_full((x.shape[0], WINDOW), torch.inf)
    net = Net(
        losses=endless,
        lowest=endless[:, :1],
        model=x,
        falls=zero,
        stretch=zero,
        trend=zero,
        longest=zero,
    )
    if used:
        return net
    return Net(*[field[:, :0].clone() for field in net])  # a view would keep all of x alive


def follow(net: Net, guard: Guard, products: Tensor, work: Scalar) -> Net:
    """The net that knows how long this round's update is, also beside the one before.

    After a fall these two belong to different models, and tell nothing.
    """
    gg = products[..., 2, 2:]
    change = (gg / _square_before(products)).log() / 2
    known = change.isfinite() & (guard.slope > 0)
    trend = torch.where(known, (net.trend + change.nan_to_num(0.0)) / 2, net.trend)
    longest = torch.maximum(net.longest, work * gg.sqrt())
    return net._replace(trend=trend, longest=longest)


def _square_before(products: Tensor) -> Tensor:
    """|g_{k-1}|^2, from the inner products of s, y = g_k - g_{k-1} and g_k."""
    yy = products[..., 1, 1:2]
    yg = products[..., 1, 2:]
    gg = products[..., 2, 2:]
    return (gg - 2 * yg + yy).clamp(min=0)


def wanted(net: Net) -> Tensor:
    """The agreement that the server wants after a step, [trials, 1]."""
    shrink = net.trend.exp()
    return WANTED * ((shrink - HALVED) / (STEADY - HALVED)).clamp(0, 1)


def adapt(guard: Guard, net: Net, products: Tensor, work: Scalar) -> Guard:
    """New radius and gamma, after a look back along the last step.

    `products` [trials, 3, 3] holds the inner products of s, y and g.
    """
    target = wanted(net)
    sg = products[..., 0, 2:]
    gg = products[..., 2, 2:]
    moved = guard.slope > 0
    slower = (_square_before(products) / gg).sqrt().clamp(max=1).nan_to_num(1.0)
    agreement = torch.where(moved, -sg / guard.slope * slower, target)
    m = ((1 - target) / (1 - agreement).clamp(min=TINY)).clamp(SHRINK, STRETCH)
    fedavg = work * gg.sqrt()
    radius = torch.where((m < 1) | guard.capped, m * guard.radius, guard.radius)
    most = torch.maximum(STRETCH * fedavg, net.longest)
    factor = torch.where(guard.capped, 1.0, m)
    gamma = (factor * guard.gamma).clamp(1, FLATTEST)
    return guard._replace(radius=radius.clamp(fedavg, most), gamma=gamma)


def advance(
    guard: Guard,
    eta: Scalar,
    work: Scalar,
    g: Tensor,
    direction: Tensor,
) -> tuple[Tensor, Guard]:
    """The step [trials, d], and the guard that remembers it.

    g and direction = B^-1 g are [trials, d]; direction is overwritten. The radius must not be
    smaller than |u|, as `adapt` leaves it. `share` is such that B s = -share g_{k-1} along s:
    u^T B u, which nobody knows, is taken for |u|^4 / u^T n, the least that it can be.
    """
    inner = gram(g, direction)
    uu = work * work * inner[..., 0, :1]
    un = work * inner[..., 0, 1:]
    fedavg = uu.sqrt()  # |u|
    newton = inner[..., 1, 1:].sqrt()  # |n|
    fits = newton <= (1 + ROUNDING) * guard.radius  # in round 1 they are equal
    beyond = (newton - fedavg).clamp(min=TINY)
    b = torch.where(fits, 1.0, ((guard.radius - fedavg) / beyond).clamp(0, 1))
    slope = b * un + (1 - b) * uu  # u^T of the step
    bent = b * b * un + 2 * b * (1 - b) * uu + (1 - b) ** 2 * uu * uu / un.clamp(min=TINY)
    near = (eta * b).to(g.dtype)
    far = (eta * (1 - b) * work).to(g.dtype)
    move = direction.mul_(-near).sub_(far * g)
    share = eta * bent / slope.clamp(min=TINY)
    return move, guard._replace(slope=eta * slope / work, share=share, capped=~fits)


def is_fedavg(x: Tensor, new: Tensor, averaged: Tensor) -> Tensor:
    """Whether the new model is FedAvg's but for rounding, [trials, 1].

    All three models are [trials, d]; x is the one before the step. Both ways from x take a few
    operations, each of which rounds by at most eps times its result.
    """
    eps = torch.finfo(x.dtype).eps
    largest = x.abs() + (averaged - x).abs()
    return ((new - averaged).abs() <= OPERATIONS * eps * largest).all(-1, keepdim=True)


def misled(net: Net, loss: Tensor | None, lengths: Tensor) -> Tensor:
    """Whether the last step has misled the server, [trials, 1].

    `loss` [trials, 1] is what the clients report, `lengths` [trials, 1] is |g_k| / |g_{k-1}|.
    """
    long = lengths > JUMP
    if loss is not None:
        highest = net.losses.amax(-1, keepdim=True)
        lowest = net.losses.amin(-1, keepdim=True)
        usual = torch.maximum(highest - lowest, NOTICED * highest.abs())
        long = long | ~loss.isfinite() | (loss > highest + usual)
    return long & (net.stretch > BEYOND) & (net.falls < PATIENCE)


def remember(
    net: Net,
    loss: Tensor | None,
    averaged: Tensor,
    stretch: Tensor,
    fell: Tensor,
) -> Net:
    """The net after a round: `averaged` [trials, d] is FedAvg's model of this round.

    Where the server fell, the losses so far say nothing about what is to come.
    """
    better = torch.ones_like(fell)
    lowest = net.lowest
    losses = net.losses
    if loss is not None:
        losses = torch.cat((losses[:, 1:], loss), -1)
        better = loss <= net.lowest
        lowest = torch.minimum(loss, net.lowest)
    keep = better & ~fell
    return Net(
        losses=torch.where(fell, torch.inf, losses),
        lowest=torch.where(fell, torch.inf, lowest),
        model=torch.where(keep, averaged, net.model),
        falls=net.falls + fell,
        stretch=torch.where(fell, 0.0, stretch),
        trend=torch.where(fell, 0.0, net.trend),
        longest=torch.where(fell, 0.0, net.longest),
    )
