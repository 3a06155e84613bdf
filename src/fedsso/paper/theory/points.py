"""Two points that the paper speaks of: the Lighthouse point, and the point where FedSSO ends up.

Theorem 1.1 says that there is a point x̂ at which the gradient of f equals the averaged gradient g
of the round, the Lighthouse point. It is looked for where it exists, and two functions are shown
for which it does not. The second part shows that FedSSO with a constant client step ends at
FedAvg's fixed point, not at the minimiser.
"""

from __future__ import annotations

from itertools import chain
from math import pi
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ...algorithms import FedAvg, FedSSO
from ...data.federation import Federation
from ...data.synthetic import quadratic, random_quadratic
from ...experiment.calls import simulate
from .claims import LIMIT_ALPHAS as ALPHAS
from .claims import LIMIT_ROUNDS as ROUNDS
from .claims import LIMIT_TAU as TAU
from .claims import Effort, Fact, Section, spread
from .watch import labelled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

SMALL = ALPHAS[-3:]  # the client steps for which the distance is proportional to alpha


def model(
    fed: Federation,
    record: FedSSO | FedAvg,
    rounds: int,
    tau: int,
    **options: Any,
) -> Tensor:
    """The model [d] after some rounds with exact gradients.

    `options` are further options of `simulate`, such as the loss or the initial model.
    """
    run = simulate(
        fed,
        "linear",
        record,
        rounds=rounds,
        local_steps=tau,
        batch_size=None,
        dtype="float64",
        eval_every=rounds,
        device="cpu",
        **options,
    )
    x: Tensor = run.x
    return x


def averaged_gradient(
    fed: Federation,
    x: Tensor,
    alpha: float,
    tau: int,
    **options: Any,
) -> Tensor:
    """FedSSO's averaged gradient g at x, which is minus its first step.

    In the first round B is the identity, and with eta = 1 the step is -g. With tau = 1 it is the
    gradient of f.

    Args:
        fed: The clients, whose gradients are exact.
        x: The model [d] that the round starts from.
        alpha: The client step.
        tau: The number of local steps.
        **options: Further options of `simulate`, such as the loss.
    """
    record = FedSSO(alpha=alpha, eta=1.0, guard="none")
    return x - model(fed, record, 1, tau, init=x, **options)


# ---- the Lighthouse point ----


def local_points(
    fed: Federation,
    x: Tensor,
    alpha: float,
    tau: int,
    **options: Any,
) -> Tensor:
    """The points [clients, tau, d] at which the clients take their gradients in a round from x.

    The first point of every client is x. The simulator does not show local models, so each client
    is run alone with 1, 2, ... local steps.
    """
    every = []  # FedAvg of one client and one round takes its local steps alone
    for i in range(fed.clients):
        rows = fed.rows_of(i)
        own = (fed.x[rows], fed.y[rows])
        alone = Federation.from_clients([own], test_fraction=0)
        points = [x]
        for steps in range(1, tau):
            point = model(alone, FedAvg(alpha=alpha), 1, steps, init=x, **options)
            points.append(point)
        every.append(torch.stack(points))
    return torch.stack(every)


def residual_at_mean(fed: Federation, alpha: float) -> float:
    """||grad f(m) - g|| at the mean m of all local points of a round from zero.

    For quadratics with a common Hessian it is zero: then m is the Lighthouse point.
    """
    x = fed.x.new_zeros(fed.x.shape[1])
    mean = local_points(fed, x, alpha, TAU).mean((0, 1))
    g = averaged_gradient(fed, x, alpha, TAU)
    return float((averaged_gradient(fed, mean, alpha, 1) - g).norm())


def on_a_line() -> tuple[float, bool]:
    """Look for the Lighthouse point of a convex function of one variable with the secant method.

    Returns |f'(x) - g| where the method ends, and whether g lies between the slopes of f at the
    outermost local points, so that there must be such a point between them.
    """
    alpha = 1.0
    fed = labelled(1, 1.0, 1)
    start = torch.tensor([2.0], dtype=torch.float64)
    options: dict[str, Any] = {"loss": "bce", "l2": 0.01}
    points = local_points(fed, start, alpha, TAU, **options)
    g = averaged_gradient(fed, start, alpha, TAU, **options)

    def off(x: Tensor) -> Tensor:
        return averaged_gradient(fed, x, alpha, 1, **options) - g

    old = points.min().reshape(1)
    new = points.max().reshape(1)
    before = off(old)
    now = off(new)
    between = bool(before <= 0 <= now)
    while now.abs() > 1e-14:
        following = new - now * (new - old) / (now - before)
        old = new
        new = following
        before = now
        now = off(new)
    return float(now.abs()), between


def bowl(outputs: Tensor, factor: Tensor) -> Tensor:
    """1 + factor (z atan z - log(1 + z^2) / 2), whose derivative is factor atan z.

    Without the 1 the loss would soon be a thousand times the first one, which the simulator takes
    for divergence.
    """
    z = outputs[:, 0]
    return 1 + factor * (z * torch.atan(z) - torch.log1p(z * z) / 2)


def two_bowls() -> tuple[float, float]:
    """One round on two functions of one variable for which there is no Lighthouse point.

    They have f_1' = atan and f_2' = -atan/2, so |f'| = |atan|/4 < pi/8. From -0.1 two large steps
    take the clients far to both sides, where their slopes add up instead of cancelling. Returns the
    averaged gradient g, and the mean slope in the second step.
    """
    first = ([[1.0]], [1.0])  # one row x = 1, whose label is the factor of `bowl`
    second = ([[1.0]], [-0.5])
    fed = Federation.from_clients([first, second], test_fraction=0)
    x = torch.tensor([-0.1], dtype=torch.float64)
    one = float(averaged_gradient(fed, x, 1000.0, 1, loss=bowl))
    two = float(averaged_gradient(fed, x, 1000.0, 2, loss=bowl))
    return two, 2 * two - one


def lighthouse(_: Effort) -> Section:
    """Test Theorem 1.1 where it holds, and on a federation for which it does not.

    Nothing here is random, so there is one round whatever the effort.
    """
    claim = "Theorem 1.1"
    own = random_quadratic(4, 0, dim=5, condition=10.0)
    A, b = parts(own)
    common = quadratic(A[:1].expand_as(A), b)
    same = residual_at_mean(common, 0.3)
    different = residual_at_mean(own, 0.3)
    line, between = on_a_line()
    g, second = two_bowls()
    found = "yes" if between else "no"
    rows = [
        ("common Hessian: ‖∇f(mean of the local points) − g‖", f"{same:.1e}"),
        ("own Hessians: the same", f"{different:.1e}"),
        ("d = 1, convex: |f'(x̂) − g|, x̂ between the local points", f"{line:.1e}, {found}"),
        ("two functions that are not convex: g, sup |f'| = π/8", f"{g:.4f}, {pi / 8:.4f}"),
        ("their mean slope in the second local step, 3π/8", f"{second:.4f}, {3 * pi / 8:.4f}"),
    ]
    facts = [
        Fact(claim, "residual, common Hessian", None, None, same),
        Fact(claim, "residual, own Hessians", None, None, different),
        Fact(claim, "residual, one dimension", None, None, line),
        Fact(claim, "g, two functions", None, None, g),
        Fact(claim, "mean slope of the second step, two functions", None, None, second),
    ]
    return Section(
        f"{claim}: the Lighthouse point",
        "For smooth f there is a point x̂_k at which ∇f equals the averaged gradient g of the "
        "round; for d > 1 it is put together from one point for each coordinate.",
        "One round with exact gradients. "
        f"Four quadratics in five dimensions (α = 0.3, τ = {TAU}) with a common Hessian, then "
        "with their own; four logistic losses in one dimension; and f_1' = atan x, "
        "f_2' = −½ atan x from x = −0.1 with α = 1000, τ = 2: the first client jumps far to the "
        "right, the second far to the left. (A strongly convex f has a point with any given "
        "gradient; it can fail only for others.)",
        rows,
        "The point exists wherever f is strongly convex, for a common Hessian (the mean of the "
        "local points) and for convex functions of one variable (between them), but not in "
        f"general: with the two functions g = {g:.3f}, while |f'| < {pi / 8:.3f} everywhere; "
        "the algorithm does not need it.",
        facts,
    )


# ---- where FedSSO ends up ----


def parts(fed: Federation) -> tuple[Tensor, Tensor]:
    """The Hessians A_i [n, d, d] and minimisers b_i [n, d] of a federation of quadratics.

    Such a federation holds them as rows of a least-squares problem: the mean over a client's rows
    of (x^T w - y)^2 has the Hessian 2 X^T X / rows, and is zero where X w = y.
    """
    A = []
    b = []
    for i in range(fed.clients):
        rows = fed.rows_of(i)
        x = fed.x[rows]
        A.append(2 / len(rows) * x.mT @ x)
        b.append(torch.linalg.solve(x, fed.y[rows]))
    return torch.stack(A), torch.stack(b)


def fixed_point(
    fed: Federation,
    alpha: float,
    tau: int,
) -> Tensor:
    """FedAvg's fixed point [d] on a federation of quadratics, for client step alpha and tau steps.

    It solves sum_i p_i (I - (I - alpha A_i)^tau) (x - b_i) = 0: there the clients' moves cancel.
    """
    A, b = parts(fed)
    eye = torch.eye(A.shape[-1], dtype=A.dtype)
    power = torch.linalg.matrix_power(eye - alpha * A, tau)
    W = fed.p[:, None, None] * (eye - power)
    right = torch.einsum("nij,nj->i", W, b)
    x: Tensor = torch.linalg.solve(W.sum(0), right)
    return x


class End(NamedTuple):
    """Where a run ends: its distances to the minimiser and to FedAvg's fixed point."""

    minimiser: float
    """The distance to the minimiser of f."""
    fixed: float
    """The distance to FedAvg's fixed point for the same client step and local steps."""


Ends = dict[float, list[End]]
"""The ends of runs with a client step, one for each draw of the problem."""


def end(
    fed: Federation,
    alpha: float,
    tau: int,
    effort: Effort,
) -> End:
    """Where FedSSO without guard ends on a federation of quadratics.

    All but the shortest efforts have enough rounds to get there.
    """
    assert fed.optimum is not None
    rounds = min(ROUNDS, effort.rounds)
    x = model(fed, FedSSO(alpha=alpha, guard="none"), rounds, tau)
    to_minimiser = x - fed.optimum
    to_fixed = x - fixed_point(fed, alpha, tau)
    return End(float(to_minimiser.norm()), float(to_fixed.norm()))


def bias(effort: Effort) -> Section:
    """Where FedSSO ends for several client steps, and for one local step.

    Every seed is another draw of the problem.
    """
    feds = [random_quadratic(10, seed, dim=10, condition=10.0) for seed in effort.seeds]
    found: Ends = {}
    for alpha in ALPHAS:
        found[alpha] = [end(fed, alpha, TAU, effort) for fed in feds]
    single = [end(fed, ALPHAS[0], 1, effort) for fed in feds]
    slopes = _slopes(found, len(feds))
    every = chain.from_iterable(found.values())
    away = max(one.fixed for one in every)
    near = max(one.minimiser for one in single)
    return Section(
        "Where FedSSO ends up: FedAvg's fixed point",
        "Theorem 2.1 and the text let x_k converge to the minimiser x*; with constant α that is "
        "never qualified.",
        "Ten quadratics in ten dimensions with Hessians and minimisers of their own, exact "
        f"gradients, constant α, η = 1, {ROUNDS} rounds without the reset; {len(feds)} draws of "
        "the problem. x_α solves Σ p_i (I − (I − αA_i)^τ)(x − b_i) = 0.",
        _limit_rows(found, single, slopes),
        f"With τ = {TAU} every run ends within {away:.0e} of FedAvg's fixed point, whose distance "
        f"to the minimiser falls like α^{np.mean(slopes):.2f}, and with τ = 1 within {near:.0e} "
        "of the minimiser: FedSSO accelerates FedAvg, it does not remove client drift.",
        _limit_facts(found, single, slopes, effort),
    )


def _slopes(found: Ends, problems: int) -> list[float]:
    """For each problem, the slope of log distance to the minimiser on log alpha.

    It is 1 where the distance is proportional to alpha, which is expected for small alpha alone.
    """
    x = np.log(SMALL)
    slopes = []
    for i in range(problems):
        distances = [found[alpha][i].minimiser for alpha in SMALL]
        slope, _ = np.polyfit(x, np.log(distances), 1)
        slopes.append(float(slope))
    return slopes


def _limit_rows(
    found: Ends,
    single: Sequence[End],
    slopes: Sequence[float],
) -> list[tuple[str, str]]:
    """The table of distances.

    `found` are the runs with several local steps by client step, `single` those with one.
    """
    rows = []
    for alpha, several in found.items():
        label = f"τ = {TAU}, α = {alpha:g}: distance to x*, to x_α"
        rows.append((label, _distances(several)))
    label = f"τ = 1, α = {ALPHAS[0]:g}: distance to x*, to x_α"
    rows.append((label, _distances(single)))
    label = f"slope of log distance to x* on log α, α ≤ {SMALL[0]:g}"
    rows.append((label, spread(slopes)))
    return rows


def _distances(several: Sequence[End]) -> str:
    """The mean distance to the minimiser, and the largest to the fixed point."""
    away = np.mean([one.minimiser for one in several])
    near = max(one.fixed for one in several)
    return f"{away:.2g}, {near:.0e}"


def _limit_facts(
    found: Ends,
    single: Sequence[End],
    slopes: Sequence[float],
    effort: Effort,
) -> list[Fact]:
    """The slopes, then the distances of every run."""
    facts = []
    for seed, slope in zip(effort.seeds, slopes, strict=True):
        facts.append(Fact("Limit", "slope of the distance in alpha", seed, None, slope))
    for alpha, several in found.items():
        facts += _end_facts(f"tau = {TAU}, alpha = {alpha:g}", several, effort)
    return facts + _end_facts(f"tau = 1, alpha = {ALPHAS[0]:g}", single, effort)


def _end_facts(
    setting: str,
    several: Sequence[End],
    effort: Effort,
) -> list[Fact]:
    """Both distances of every run of one setting."""
    facts = []
    for seed, one in zip(effort.seeds, several, strict=True):
        to_minimiser = f"distance to the minimiser, {setting}"
        to_fixed = f"distance to the fixed point, {setting}"
        facts.append(Fact("Limit", to_minimiser, seed, None, one.minimiser))
        facts.append(Fact("Limit", to_fixed, seed, None, one.fixed))
    return facts
