"""Points that the paper speaks of: the Lighthouse point, and where FedSSO ends up."""

from __future__ import annotations

from math import pi
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...algorithms import FedAvg, FedSSO
from ...data import Federation, quadratic
from ...data.synthetic import random_quadratic
from ...experiment.calls import simulate
from .watch import Array, Effort, Fact, Section, labelled, spread

ALPHAS = (0.4, 0.2, 0.1, 0.05, 0.025)
TAU, ROUNDS = 5, 60


def model(
    fed: Federation, record: FedSSO | FedAvg, rounds: int, tau: int, **options: Any
) -> Tensor:
    """The model after some rounds with exact gradients."""
    fixed: dict[str, Any] = {
        "batch_size": None,
        "dtype": "float64",
        "eval_every": rounds,
        "device": "cpu",
    }
    x: Tensor = simulate(
        fed, "linear", record, rounds=rounds, local_steps=tau, **fixed, **options
    ).x
    return x


def averaged_gradient(fed: Federation, x: Tensor, alpha: float, tau: int, **options: Any) -> Tensor:
    """FedSSO's g at x: its first step is -g. With tau = 1 it is the gradient of f."""
    return x - model(fed, FedSSO(alpha=alpha, eta=1.0, guard="none"), 1, tau, init=x, **options)


# ---- the Lighthouse point ----


def local_points(fed: Federation, x: Tensor, alpha: float, tau: int, **options: Any) -> Tensor:
    """The points [clients, tau, d] at which the clients take their gradients, x first."""
    alone = [(fed.x[fed.rows_of(i)], fed.y[fed.rows_of(i)]) for i in range(fed.clients)]
    feds = [Federation.from_clients([pair], test_fraction=0) for pair in alone]
    moved = [
        [model(one, FedAvg(alpha=alpha), 1, j, init=x, **options) for j in range(1, tau)]
        for one in feds
    ]
    return torch.stack([torch.stack([x, *points]) for points in moved])


def residual_at_mean(fed: Federation, alpha: float) -> float:
    """||grad f(m) - g|| for the mean m of the local points of a round from zero."""
    x = fed.x.new_zeros(fed.x.shape[1])
    mean = local_points(fed, x, alpha, TAU).mean((0, 1))
    g = averaged_gradient(fed, x, alpha, TAU)
    return float((averaged_gradient(fed, mean, alpha, 1) - g).norm())


def on_a_line() -> tuple[float, bool]:
    """One dimension, convex: |f'(x) - g| where the secant method ends, and whether g lies between
    the local slopes."""
    fed, x, alpha = labelled(1, 1.0, 1), torch.tensor([2.0], dtype=torch.float64), 1.0
    options: dict[str, Any] = {"loss": "bce", "l2": 0.01}
    points = local_points(fed, x, alpha, TAU, **options)
    g = averaged_gradient(fed, x, alpha, TAU, **options)

    def off(x: Tensor) -> Tensor:
        return averaged_gradient(fed, x, alpha, 1, **options) - g

    old, new = points.min().reshape(1), points.max().reshape(1)
    before, now = off(old), off(new)
    between = bool(before <= 0 <= now)
    while now.abs() > 1e-14:
        old, new = new, new - now * (new - old) / (now - before)
        before, now = now, off(new)
    return float(now.abs()), between


def bowl(outputs: Tensor, factor: Tensor) -> Tensor:
    """1 + factor (z atan z - log(1 + z^2) / 2), whose derivative is factor atan z.

    The 1 keeps the simulator from taking a loss a thousand times the first one for divergence.
    """
    z = outputs[:, 0]
    return 1 + factor * (z * torch.atan(z) - torch.log1p(z * z) / 2)


def two_bowls() -> tuple[float, float]:
    """f_1' = atan, f_2' = -atan/2: g of two large steps from -0.1, and the mean slope in the second
    of them."""
    fed = Federation.from_clients([([[1.0]], [1.0]), ([[1.0]], [-0.5])], test_fraction=0)
    x = torch.tensor([-0.1], dtype=torch.float64)
    one, two = (float(averaged_gradient(fed, x, 1000.0, tau, loss=bowl)) for tau in (1, 2))
    return two, 2 * two - one


def lighthouse(_: Effort) -> Section:
    """Theorem 1.1 where it holds, and a federation for which it does not."""
    own = random_quadratic(4, 0, dim=5, condition=10.0)
    A, b = parts(own)
    common = quadratic(A[:1].expand_as(A), b)
    same, different = (residual_at_mean(fed, 0.3) for fed in (common, own))
    line, between = on_a_line()
    g, second = two_bowls()
    claim = "Theorem 1.1"
    rows = [
        ("common Hessian: ‖∇f(mean of the local points) − g‖", f"{same:.1e}"),
        ("own Hessians: the same", f"{different:.1e}"),
        (
            "d = 1, convex: |f'(x̂) − g|, x̂ between the local points",
            f"{line:.1e}, {'yes' if between else 'no'}",
        ),
        ("two functions that are not convex: g, sup |f'| = π/8", f"{g:.4f}, {pi / 8:.4f}"),
        ("their mean slope in the second local step, 3π/8", f"{second:.4f}, {3 * pi / 8:.4f}"),
    ]
    return Section(
        f"{claim}: the Lighthouse point",
        "For smooth f there is a point x̂_k at which ∇f equals the averaged gradient g of the round; for d > 1 it is "
        "put together from one point for each coordinate.",
        f"One round with exact gradients. Four quadratics in five dimensions (α = 0.3, τ = {TAU}) with a common "
        "Hessian, then with their own; four logistic losses in one dimension; and f_1' = atan x, "
        "f_2' = −½ atan x from "
        "x = −0.1 with α = 1000, τ = 2: the first client jumps far to the right, the second far to "
        "the left. (A "
        "strongly convex f has a point with any given gradient; it can fail only for others.)",
        rows,
        "The point exists wherever f is strongly convex, for a common Hessian (the mean of the local points) and for "
        f"convex functions of one variable (between them), but not in general: with the two "
        f"functions g = {g:.3f}, "
        f"while |f'| < {pi / 8:.3f} everywhere; the algorithm does not need it.",
        [
            Fact(claim, "residual, common Hessian", None, None, same),
            Fact(claim, "residual, own Hessians", None, None, different),
            Fact(claim, "residual, one dimension", None, None, line),
            Fact(claim, "g, two functions", None, None, g),
            Fact(claim, "mean slope of the second step, two functions", None, None, second),
        ],
    )


# ---- where FedSSO ends up ----


def parts(fed: Federation) -> tuple[Tensor, Tensor]:
    """A_i and b_i of a federation of quadratics, which its rows hold as least squares."""
    rows = [fed.rows_of(i) for i in range(fed.clients)]
    A = torch.stack([2 / len(r) * fed.x[r].mT @ fed.x[r] for r in rows])
    return A, torch.stack([torch.linalg.solve(fed.x[r], fed.y[r]) for r in rows])


def fixed_point(fed: Federation, alpha: float, tau: int) -> Tensor:
    """Of FedAvg: sum_i p_i (I - (I - alpha A_i)^tau) (x - b_i) = 0."""
    A, b = parts(fed)
    eye = torch.eye(A.shape[-1], dtype=A.dtype)
    W = fed.p[:, None, None] * (eye - torch.linalg.matrix_power(eye - alpha * A, tau))
    x: Tensor = torch.linalg.solve(W.sum(0), torch.einsum("nij,nj->i", W, b))
    return x


class End(NamedTuple):
    """Where a run ends: its distances to the minimiser and to FedAvg's fixed point."""

    minimiser: float
    fixed: float


def end(fed: Federation, alpha: float, tau: int, effort: Effort) -> End:
    """After FedSSO without guard; the rounds of any but the shortest effort are enough to get
    there."""
    assert fed.optimum is not None
    x = model(fed, FedSSO(alpha=alpha, guard="none"), min(ROUNDS, effort.rounds), tau)
    return End(
        *(float((x - point).norm()) for point in (fed.optimum, fixed_point(fed, alpha, tau)))
    )


def bias(effort: Effort) -> Section:
    """FedSSO's limit for several alphas, and for one local step."""
    feds = [random_quadratic(10, seed, dim=10, condition=10.0) for seed in effort.seeds]
    found = {a: [end(fed, a, TAU, effort) for fed in feds] for a in ALPHAS}
    single = [end(fed, ALPHAS[0], 1, effort) for fed in feds]
    small = np.log(ALPHAS[-3:])
    slopes = [
        _slope(small, np.log([found[a][i].minimiser for a in ALPHAS[-3:]]))
        for i in range(len(feds))
    ]
    claim = "Limit"
    facts = [
        Fact(claim, "slope of the distance in alpha", i, None, v)
        for i, v in zip(effort.seeds, slopes, strict=True)
    ]
    for a, several in found.items():
        facts += _ends(claim, f"tau = {TAU}, alpha = {a:g}", several, effort)
    facts += _ends(claim, f"tau = 1, alpha = {ALPHAS[0]:g}", single, effort)
    away, near = (
        max(e.fixed for several in found.values() for e in several),
        max(e.minimiser for e in single),
    )
    return Section(
        "Where FedSSO ends up: FedAvg's fixed point",
        "Theorem 2.1 and the text let x_k converge to the minimiser x*; with constant α that is never qualified.",
        "Ten quadratics in ten dimensions with Hessians and minimisers of their own, exact gradients, constant α, "
        f"η = 1, {ROUNDS} rounds without the reset; {len(feds)} draws of the problem. x_α solves "
        "Σ p_i (I − (I − αA_i)^τ)(x − b_i) = 0.",
        [
            *(
                (f"τ = {TAU}, α = {a:g}: distance to x*, to x_α", _distances(several))
                for a, several in found.items()
            ),
            (f"τ = 1, α = {ALPHAS[0]:g}: distance to x*, to x_α", _distances(single)),
            (f"slope of log distance to x* on log α, α ≤ {ALPHAS[-3]:g}", spread(slopes)),
        ],
        f"With τ = {TAU} every run ends within {away:.0e} of FedAvg's fixed point, whose distance to the minimiser "
        f"falls like α^{np.mean(slopes):.2f}, and with τ = 1 within {near:.0e} of the minimiser: "
        f"FedSSO accelerates "
        "FedAvg, it does not remove client drift.",
        facts,
    )


def _slope(x: Array, y: Array) -> float:
    return float(np.polyfit(x, y, 1)[0])


def _ends(claim: str, setting: str, several: list[End], effort: Effort) -> list[Fact]:
    return [
        Fact(claim, f"distance to the {name}, {setting}", seed, None, value)
        for seed, one in zip(effort.seeds, several, strict=True)
        for name, value in zip(("minimiser", "fixed point"), one, strict=True)
    ]


def _distances(several: list[End]) -> str:
    away, near = zip(*several, strict=True)
    return f"{np.mean(away):.2g}, {max(near):.0e}"
