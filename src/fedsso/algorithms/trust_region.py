"""The guard of FedSSO: bounds the server's step and distrusts noisy pairs.

The paper's Algorithm 1 has no guard. Its step -eta B^-1 g can be far too long: in the first
rounds, when B knows nearly nothing, and after a pair (s, y) that was mostly noise. With
guard="adaptive" the server therefore keeps a trust region of radius r, and looks back in every
round at the step s that it took in the round before. The symbols are those of `fedsso.py`.

Looking back. The slope of f along s was g_{k-1}^T s < 0 where the step began, and is g_k^T s where
it ended. The parabola with these two slopes has its minimum at m times the step:

    theta = g_k^T s / -g_{k-1}^T s,    m = 1 / (1 + theta)

So the step was too short if m > 1, and too long if m < 1. One round alone is never trusted further
than 1/2 <= m <= 10 in the first four rounds, and 1/2 <= m <= 2 later. Where only n clients answer,
the 10 is replaced by 1 + n if that is less, and a model of one layer has as many more first rounds
as it takes until every client has answered about four times. Where a memory has corrected g_k
(`memory.py`), theta is computed with the plain mean of the answers as well: the value nearer to 0
counts, and 0 if their signs differ.

Radius. It begins as the length of FedAvg's step, alpha tau |g|. Where the model has one layer and
the server chooses alpha, it begins as f / |g| if that is more: the length of Polyak's step to the
minimum of a convex loss whose least value is 0. f is the loss that the clients report of round 1.
A round that has exploded is followed by FedAvg's length.
The radius is multiplied by m if the last step was too long, or if it was cut to the radius. The
next step is -t B^-1 g with

    t = min(eta, r / |B^-1 g|)

gamma. The form `bfgs` starts B from I / gamma, which is what B still is in all directions that no
pair has shown. If the last step was not cut, its length came from B, so m tells how wrong B was:
the best step would have been -m t B^-1 g, and gamma is multiplied by m t. If it was cut and still
too long, gamma is multiplied by m. Then

    gamma  <-  |s|^2 / y^T s    if that is more, and cos(s, y) >= 1/2

The curvature along the last step is y^T s / |s|^2. Pairs show steep directions first, so those that
no pair has shown are flatter. All of this within 1 <= gamma <= 100.

Exact gradients. All this is caution against noise. Where every client sends one gradient over all
its rows, and all of them answer, g has none. So the first step, which is nothing but a probe, is
believed: m <= 1000 in round 2, and m <= 10 in all later rounds. gamma follows a step that was cut
as well, but upwards alone: it is multiplied by m t or 1, the larger of the two. It may be as large
as 1 / lam, the flattest that the paper's curvature test allows; the lower bound from |s|^2 / y^T s
and Polyak's length are not used. And y is taken as it is: its angle
to s tells of the curvature, not of noise. A trial of which a round has exploded keeps to m <= 2.

Damping. A y that hardly points along s is mostly noise. It is drawn towards B s, the y that would
leave B as it is:

    y  <-  phi y + (1 - phi) B s,    phi = cos(s, y) / 0.3, within 0 <= phi <= 1

The server knows B s without any matrix: since s = -t B^-1 g_{k-1}, it is -t g_{k-1}. Where phi = 0,
which means that y points away from s, y becomes 0 and the pair does not enter B.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..algorithm.contract import Cohort
from ..support.linalg import gram
from ..support.trees import Scalar

TRUSTED = 0.3  # cosine of s and y from which on y is taken as it is
CLEAR = 0.5  # cosine of s and y from which on they tell the curvature along s
EARLY = 4  # the first rounds, in which radius and gamma may grow faster
EARLY_GROWTH = 10  # what they may grow by in one of these rounds
LATE_GROWTH = 2  # and in one of the later rounds
PROBE_GROWTH = 1000  # what they may grow by after the first step, if gradients are exact
FLATTEST = 100  # the largest gamma, unless they are
ALL = 1 - 1e-9  # the share of the clients' weights from which on everybody has answered
TINY = 1e-300  # stands for a direction of length 0


class Guard(NamedTuple):
    """The trust region and what the server remembers of its last step; all [trials, 1]."""

    radius: Tensor  # r; 0 before the first round
    gamma: Tensor  # B starts from I / gamma, in form bfgs
    slope: Tensor  # -g_{k-1}^T s; 0 if there was no step
    share: Tensor  # t: the step was -t B^-1 g_{k-1}
    capped: Tensor  # whether it was cut to the radius


class Trust(NamedTuple):
    """How far one look back is trusted."""

    least: Tensor  # [trials, 1]: m is at most 1 over this
    flattest: Scalar  # the largest gamma
    exact: bool  # whether gradients are; gamma is then told by m t alone, also of a cut step


def start(x: Tensor) -> Guard:
    """The guard before the first step from the models x [trials, d]."""
    zero = x.new_zeros(x.shape[0], 1, dtype=torch.float64)
    one = zero.new_ones(zero.shape)
    return Guard(radius=zero, gamma=one, slope=zero, share=zero, capped=zero.bool())


def adapt(
    guard: Guard,
    products: Tensor,
    work: Scalar,
    trust: Trust,
    heard: Tensor | None = None,
    loss: Tensor | None = None,
) -> Guard:
    """New radius and gamma, after a look back along the last step.

    Args:
        guard: As the last step left it.
        products: The inner products of s, y and g, [trials, 3, 3].
        work: alpha tau, so that work |g| is the length of FedAvg's step.
        trust: How far, from `careful` or `exact`.
        heard: s^T times the plain mean gradient of those who answered, [trials, 1], where g was
            corrected by a memory.
        loss: f, [trials, 1], where the radius may begin with it.
    """
    sg = products[..., 0, 2:]
    size = products[..., 2, 2:].sqrt()
    moved = guard.slope > 0
    radius = torch.where(guard.radius > 0, guard.radius, first_radius(size, work, loss))
    theta = torch.where(moved, sg / guard.slope, 0.0)
    if heard is not None:
        theta = _agreed(theta, torch.where(moved, heard / guard.slope, 0.0))
    m = 1 / torch.clamp(1 + theta, min=trust.least).clamp(max=2)
    radius = torch.where((m < 1) | guard.capped, m * radius, radius)
    factor = m * guard.share
    kept = factor.clamp(min=1) if trust.exact else m.clamp(max=1)
    factor = torch.where(guard.capped | ~moved, kept, factor)
    gamma = factor * guard.gamma
    if not trust.exact:
        gamma = torch.maximum(gamma, torch.where(moved, flatness(products), 0.0))
    return guard._replace(radius=radius, gamma=gamma.clamp(max=trust.flattest).clamp(min=1))


def first_radius(size: Tensor, work: Scalar, loss: Tensor | None) -> Tensor:
    """The length of FedAvg's step, or of Polyak's if that is more and the loss f is known.

    `size` [trials, 1] is |g|. Where it is 0 the radius stays 0, and a later round is the first. A
    loss that is not finite counts as 0.
    """
    averaged = work * size
    if loss is None:
        return averaged
    polyak = torch.where(size > 0, loss / size, 0.0).nan_to_num(0.0, posinf=0.0)
    return torch.maximum(averaged, polyak)


def flatness(products: Tensor) -> Tensor:
    """|s|^2 / y^T s, one over the curvature along the last step; 0 where it is not clear.

    `products` [trials, 3, 3] are the inner products of s, y and g.
    """
    ss = products[..., 0, :1]
    sy = products[..., 0, 1:2]
    yy = products[..., 1, 1:2]
    clear = (sy > 0) & (sy >= CLEAR * (ss * yy).sqrt())
    return torch.where(clear, ss / sy, 0.0)


def careful(
    rounds: Tensor,
    growth: float = EARLY_GROWTH,
    first: float = EARLY,
) -> Trust:
    """How far to trust gradients that may be noise in part.

    `rounds` [trials, 1] counts them, this one included. `growth` is what the first rounds may let
    the radius grow by, from `early_growth`; `first` is how many these are, from `first_rounds`.
    """
    early = rounds.new_tensor(1 / growth)
    late = rounds.new_tensor(1 / LATE_GROWTH)
    return Trust(torch.where(rounds > first, late, early), FLATTEST, exact=False)


def exact(k: int, undone: Tensor, lam: Scalar) -> Trust:
    """How far to trust exact gradients, in round k.

    `undone` [trials, 1] is above 0 where a round has exploded: then no step is trusted to be
    much too short. `lam` bounds the curvature from below.
    """
    growth = PROBE_GROWTH if k == 2 else EARLY_GROWTH
    least = torch.full_like(undone, 1 / growth).masked_fill_(undone > 0, 1 / LATE_GROWTH)
    return Trust(least, 1 / lam, exact=True)


def early_growth(size: int, mass: float) -> float:
    """What the first rounds may let the radius grow by: 1 more than the clients that answered.

    `size` clients did, with `mass` of all weights. A slope that few clients agree upon may be
    theirs alone. Where all answer it is `EARLY_GROWTH`, which is also the most.
    """
    if mass > ALL:
        return EARLY_GROWTH
    return min(EARLY_GROWTH, 1 + size)


def first_rounds(mass: float) -> float:
    """How many rounds it takes until every client has answered about `EARLY` times.

    Clients with `mass` of all weights answer in a round.
    """
    return EARLY if mass > ALL else EARLY / mass


def is_alone(cohort: Cohort) -> bool:
    """Whether a single one of several clients has answered."""
    return cohort.size == 1 and cohort.mass <= ALL


def _agreed(theta: Tensor, other: Tensor) -> Tensor:
    """Of two values the one nearer to 0, and 0 where their signs differ."""
    below = torch.maximum(theta, other).clamp(max=0)
    above = torch.minimum(theta, other).clamp(min=0)
    return below + above


def damp(
    y: Tensor,
    old: Tensor,
    products: Tensor,
    guard: Guard,
) -> Tensor:
    """y [trials, d], drawn towards B s as far as its angle to s calls for; it is overwritten.

    `old` [trials, d] is g_{k-1}, `products` [trials, 3, 3] as in `adapt`. Nothing is known about
    B s where the last step did not lead downhill: then y becomes 0.
    """
    ss = products[..., 0, :1]
    sy = products[..., 0, 1:2]
    yy = products[..., 1, 1:2]
    phi = (sy / (TRUSTED * (ss * yy).sqrt())).clamp(0, 1).nan_to_num(0.0) * (guard.slope > 0)
    rest = torch.where(phi > 0, (1 - phi) * guard.share, 0.0)  # (1 - phi) B s = -rest g_{k-1}
    return y.mul_(phi.to(y.dtype)).sub_(rest.to(y.dtype) * old)


def limit(
    guard: Guard,
    eta: Scalar,
    g: Tensor,
    direction: Tensor,
    square: Tensor | None = None,
    *,
    cut: bool,
) -> tuple[Tensor, Guard]:
    """The step's share t of the direction B^-1 g, and the guard that remembers this step.

    g and direction are [trials, d], t is [trials, 1]. `square` [trials, 1] is that of the
    direction's length, where a metric measures it. With cut=False the radius bounds nothing, and t
    is eta.
    """
    slope, euclidean = torch.split(gram(g, direction)[..., 1], 1, -1)  # g^T B^-1 g, |B^-1 g|^2
    square = euclidean if square is None else square
    if cut:
        longest = guard.radius / square.sqrt().clamp(min=TINY)
    else:
        longest = torch.full_like(slope, torch.inf)
    t = torch.clamp(longest, max=eta)
    return t, guard._replace(slope=t * slope, share=t, capped=t == longest)
