"""Theorems 2.1 and 3.1: how fast FedSSO converges with the step sizes that they ask for.

Both need bounds kappa, kappa_bar of the eigenvalues of B^-1. In one dimension B is a number that the curvature rule
keeps between lam and Lam, so they are 1/Lam and 1/lam; there the theorems can be tested as they stand. In five
dimensions the same runs show what becomes of the bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..algorithms import FedSSO
from ..schedule import Decay, at, theorem_2, theorem_3
from .theory_watch import (
    CLIENTS,
    TAU,
    Array,
    Effort,
    Fact,
    Problem,
    Section,
    Seen,
    curve,
    minimiser,
    problem,
    slope,
    spread,
    watch,
    whole,
    within,
)

MU = 1.0  # the L2 penalty of the convex problem
LAM, LAM_BAR = 0.8, 1.6  # of the convex problem, whose Hessian lies between 1 and 1.25
KAPPA, KAPPA_BAR = 1 / LAM_BAR, 1 / LAM
BEND = 0.1541  # a bound of the second derivative of (sigmoid(z) - y)^2 for y = 0 or 1


def record(steps: tuple[Decay, Decay], lam: float = 1e-4, Lam: float = 9999.0) -> FedSSO:
    """The paper's algorithm, with a matrix that can be looked at."""
    return FedSSO(alpha=steps[0], eta=steps[1], lam=lam, Lam=Lam, form="bfgs-dense", guard="none")


def every(one: Problem, chosen: FedSSO, effort: Effort) -> list[Seen]:
    """A run for each seed; one alone where gradients are exact."""
    seeds = effort.seeds if one.options["batch_size"] else effort.seeds[:1]
    return [watch(one, chosen, effort.rounds, seed) for seed in seeds]


def ends(claim: str, setting: str, runs: Sequence[Seen], effort: Effort) -> list[Fact]:
    """Smallest and largest eigenvalue of B^-1 by round, as facts."""
    return [
        fact
        for seed, run in zip(effort.seeds, runs, strict=False)
        for name, end in (("smallest", "low"), ("largest", "high"))
        for fact in curve(claim, f"{name} eigenvalue of B^-1, {setting}", seed, run["k"], run[end])
    ]


def lost(runs: Sequence[Seen], effort: Effort) -> str:
    """How many runs diverged."""
    return f"{sum(len(run['k']) < effort.rounds for run in runs)} of {len(runs)}"


# ---- Theorem 2.1 ----


class Promise(NamedTuple):
    """A schedule of the theorem with its bound, and what the proof asks of it."""

    steps: tuple[Decay, Decay]
    nu: float
    beta_u: float  # must be > 1
    alpha_L: float  # alpha_1 L, must be <= 1

    def bound(self, k: Array) -> Array:
        """The promised f(x_k) - f*."""
        bound: Array = self.nu / (k + self.steps[1].shift)
        return bound


def promise(one: Problem, printed: bool = False) -> Promise:
    """Theorem 2.1 on the convex problem; the printed nu has mu where L is needed, and beta mu - 1 for beta u - 1."""
    L, away = one.smoothness(0.25), float((one.options["init"] - minimiser(one)[0]).square().sum())
    steps = theorem_2(L=L, mu=MU, tau=TAU, clients=CLIENTS, kappa=KAPPA, kappa_bar=KAPPA_BAR, printed=printed)
    beta, gamma = float(steps[1].scale), float(steps[1].shift)
    beta_u = beta * KAPPA * MU**2 / (CLIENTS * L)
    Gamma = L**2 * KAPPA_BAR**2 * one.variance() / (2 * MU * TAU)
    noise = beta**2 * Gamma / ((beta * MU if printed else beta_u) - 1)
    nu = max(noise, (MU if printed else L) / 2 * (gamma + 1) * away)
    return Promise(steps, nu, beta_u, float(at(steps[0], 1)) * L)


def convex(dim: int, batch: int | None, effort: Effort) -> Problem:
    """L2-regularised logistic regression: smooth, strongly convex, gradients of bounded variance."""
    return problem("bce", dim, batch, effort, scale=1.0, l2=MU, start=2.0)


class Tested(NamedTuple):
    """The runs of one schedule in one dimension."""

    promise: Promise
    gaps: list[Array]  # f(x_k) - f* of each seed
    runs: list[Seen]
    seeds: tuple[int, ...]

    @property
    def slopes(self) -> list[float]:
        """Of log gap on log(k + gamma) over the last decade."""
        return [self._slope(gap) for gap in self.gaps]

    @property
    def mean_slope(self) -> float:
        """The same of the seeds' mean gap."""
        return self._slope(np.mean(self.gaps, axis=0))

    def _slope(self, gap: Array) -> float:
        return slope(self.runs[0]["k"] + float(self.promise.steps[1].shift), gap)

    @property
    def share(self) -> float:
        """The largest ratio of the seeds' mean gap to the bound."""
        mean: Array = np.mean(self.gaps, axis=0)
        return float((mean / self.promise.bound(self.runs[0]["k"])).max())

    def facts(self, claim: str, name: str) -> list[Fact]:
        """The curves of every seed, and the slopes."""
        out = [Fact(claim, f"slope, {name}", i, None, v) for i, v in zip(self.seeds, self.slopes, strict=True)]
        for i, run, gap in zip(self.seeds, self.runs, self.gaps, strict=True):
            out += curve(claim, f"gap, {name}", i, run["k"], gap)
        k = self.runs[0]["k"]
        return out + curve(claim, f"bound, {name}", None, k, self.promise.bound(k))


def in_one_dimension(effort: Effort, *, printed: bool) -> Tested:
    """Runs in one dimension with mini-batches of one row."""
    one = convex(1, 1, effort)
    best, plan = minimiser(one)[1], promise(one, printed)
    runs = every(one, record(plan.steps, LAM, LAM_BAR), effort)
    return Tested(plan, [run["f"] - best for run in runs], runs, effort.seeds)


def theorem_2_1(effort: Effort) -> Section:
    """Both schedules in one dimension, the corrected one in five as well."""
    right, wrong = (in_one_dimension(effort, printed=printed) for printed in (False, True))
    settings = {"d = 5, exact gradients": convex(5, None, effort), "d = 5, mini-batches": convex(5, 5, effort)}
    five = {name: every(one, record(promise(one).steps, LAM, LAM_BAR), effort) for name, one in settings.items()}
    claim = "Theorem 2.1"
    facts = right.facts(claim, "corrected schedule") + wrong.facts(claim, "printed schedule")
    for name, runs in {"d = 1, mini-batches": right.runs, **five}.items():
        facts += ends(claim, name, runs, effort)
    return Section(
        f"{claim}: order 1/k on strongly convex functions",
        "With η_k = β/(k+γ), β = 2/μ, 1/γ = min{NL/(2κμ), μ/(2L)} and α_k = η_k Lκ̄²/(μτκ), E f(x_k) − f* ≤ ν/(k+γ); "
        "κ and κ̄ bound the eigenvalues of B⁻¹. The proof needs β·u > 1 for u = κμ²/(NL), and α_1 ≤ 1/L.",
        f"L2-regularised logistic regression (penalty {MU:g}, rows of length ≤ 1), {CLIENTS} clients with models of "
        f"their own, τ = {TAU}, {effort.rounds} rounds, {len(effort.seeds)} seeds, mini-batches of one row, "
        f"λ = {LAM:g}, Λ = {LAM_BAR:g}. The schedule as printed, and the corrected one: β = 2NL/(κμ²), "
        "γ = max{2, βL²κ̄²/(μτκ)}, and ν with L/2 in place of μ/2. The problem was chosen for a small γ, which grows "
        "like N (L/μ)³ (κ̄/κ)²/τ: hence a large penalty, and one dimension, where κ = 1/Λ and κ̄ = 1/λ are proved "
        "bounds. Slopes are of log gap on log(k+γ) over the last decade. The runs in five dimensions have the "
        "same λ, Λ, κ and κ̄; their mini-batches are of 5 rows.",
        _rows_2(right, wrong, five, effort),
        _verdict_2(right, wrong, five["d = 5, mini-batches"], effort),
        facts,
    )


def _rows_2(right: Tested, wrong: Tested, five: dict[str, list[Seen]], effort: Effort) -> list[tuple[str, str]]:
    rows = []
    for name, one in (("corrected", right), ("printed", wrong)):
        rows += [
            (
                f"{name}: β·u, α_1·L, γ",
                f"{one.promise.beta_u:.3g}, {one.promise.alpha_L:.3g}, {one.promise.steps[1].shift:.3g}",
            ),
            (f"{name}: slope of each seed's gap, of the mean gap", f"{spread(one.slopes)}, {one.mean_slope:.2f}"),
            (f"{name}: gap at the start, mean over the last 5 % of the rounds", _first_last(one.gaps)),
            (f"{name}: largest mean gap / bound", f"{one.share:.3g}"),
            (f"{name}: eigenvalues of B⁻¹ (κ = {KAPPA:g}, κ̄ = {KAPPA_BAR:g})", within(one.runs)),
            (f"{name}: pairs with an overridden cur", f"{np.mean([run['overridden'] for run in one.runs]):.1%}"),
        ]
    for name, runs in five.items():
        rows += [(f"{name}: eigenvalues of B⁻¹", within(runs)), (f"{name}: runs that diverge", lost(runs, effort))]
    return rows


def _first_last(gaps: Sequence[Array]) -> str:
    tail = max(1, len(gaps[0]) // 20)
    return f"{gaps[0][0]:.3g}, {np.mean([gap[-tail:].mean() for gap in gaps]):.2g}"


def _verdict_2(right: Tested, wrong: Tested, five: Sequence[Seen], effort: Effort) -> str:
    held = all(run["low"].min() >= KAPPA - 1e-9 and run["high"].max() <= KAPPA_BAR + 1e-9 for run in right.runs)
    return (
        f"In one dimension, where κ and κ̄ {'hold' if held else 'should hold, but do not'}, the gap "
        f"{'stays below' if right.share <= 1 else 'exceeds'} the corrected bound and falls like "
        f"k^{np.mean(right.slopes):.2f}; as printed β·u = {wrong.promise.beta_u:.2f} "
        f"{'is not > 1, so the proof says nothing' if wrong.promise.beta_u <= 1 else 'is > 1'} (the gap falls like "
        f"k^{np.mean(wrong.slopes):.2f} and reaches {wrong.share:.2g} times the printed bound); in five dimensions "
        f"with mini-batches κ and κ̄ do not (eigenvalues of B⁻¹ from {within(five)}) and {lost(five, effort)} runs "
        "diverge."
    )


# ---- Theorem 3.1 ----


def squashed(outputs: Tensor, targets: Tensor) -> Tensor:
    """(sigmoid(z) - y)^2: bounded, smooth and not convex."""
    return (torch.sigmoid(outputs[:, 0]) - targets) ** 2


def bumpy(dim: int, batch: int | None, effort: Effort) -> Problem:
    """A function that is not convex at the start, with a small penalty that keeps the models bounded."""
    return problem(squashed, dim, batch, effort, scale=4.0, l2=0.01, start=1.0)


class Descent(NamedTuple):
    """The squared gradient over the rounds of one setting."""

    dip: float  # least eigenvalue of the Hessian at the start
    least: list[Array]  # its minimum so far, of each seed
    mean: list[Array]  # its mean so far with weights eta_k, which is what the proof bounds
    runs: list[Seen]

    def slopes(self, of: Sequence[Array]) -> list[float]:
        """Of log value on log K over the last decade, of the runs that reach the end."""
        whole = max(len(run["k"]) for run in self.runs)
        kept = [(run["k"], v) for run, v in zip(self.runs, of, strict=True) if len(v) == whole]
        return [slope(k, v) for k, v in kept]


def descent(one: Problem, effort: Effort, lam: float = 1e-4, Lam: float = 9999.0) -> Descent:
    """Runs with the corrected schedule of Theorem 3.1."""
    steps = theorem_3(L=one.smoothness(BEND), tau=TAU)
    runs = every(one, record(steps, lam, Lam), effort)
    weights = [(run["k"] + 1) ** -0.5 for run in runs]
    mean = [np.cumsum(w * run["square"]) / np.cumsum(w) for w, run in zip(weights, runs, strict=True)]
    return Descent(_dip(one), [np.minimum.accumulate(run["square"]) for run in runs], mean, runs)


def _dip(one: Problem) -> float:
    start = one.simulation(FedSSO(), 1, 0)
    f, batch = whole(one, start)
    return float(torch.linalg.eigvalsh(f.hessian(start.server.x[None], batch)).min())


def theorem_3_1(effort: Effort) -> Section:
    """The squared gradient in one dimension, where kappa and kappa_bar are known, and in five."""
    settings = {
        "d = 1, mini-batches": descent(bumpy(1, 1, effort), effort, 0.25, 4.0),
        "d = 5, exact gradients": descent(bumpy(5, None, effort), effort),
        "d = 5, mini-batches": descent(bumpy(5, 5, effort), effort),
    }
    claim = "Theorem 3.1"
    facts: list[Fact] = []
    for name, one in settings.items():
        for seed, run, least, mean in zip(effort.seeds, one.runs, one.least, one.mean, strict=False):
            facts += curve(claim, f"least squared gradient, {name}", seed, run["k"], least)
            facts += curve(claim, f"mean squared gradient, {name}", seed, run["k"], mean)
        facts += ends(claim, name, one.runs, effort)
    return Section(
        f"{claim}: squared gradients on functions that are not convex",
        "With α_k = 1/(2√6 τLk) and η_k = 1/√k, min over k ≤ K of ‖∇f(x_k)‖² falls like 1/√K plus terms of order 1/K "
        "and 1/K². (Summed as they stand the proof's terms give ln K/√K, and Θ_1 = 1 makes the bound infinite.)",
        f"Loss (sigmoid(z) − y)² with penalty 0.01, {CLIENTS} clients, τ = {TAU}, {effort.rounds} rounds, "
        f"{len(effort.seeds)} seeds (one where gradients are exact), from a point where f is not convex. d = 1: "
        "mini-batches of one row, λ = 0.25, Λ = 4, so that κ = 0.25, κ̄ = 4. d = 5: λ = 1e-4, Λ = 9999 as in the "
        "paper, exact gradients or mini-batches of 5. α_k and η_k with k + 1 for k, so that Θ_1 = 1/4. Beside the "
        "minimum the mean with weights η_k, which the proof really bounds and which cannot fall faster than 1/√K. "
        "Slopes over the last decade, of runs that do not diverge; there ln K/√K has "
        f"{reference_slope(effort.rounds):.2f} and 1/√K −0.50.",
        [row for name, one in settings.items() for row in _rows_3(name, one, effort)],
        _verdict_3(settings, effort),
        facts,
    )


def reference_slope(rounds: int) -> float:
    """The slope of ln K / sqrt(K) between K = rounds/10 and rounds."""
    return (log(log(rounds)) - log(log(rounds / 10))) / log(10) - 0.5


def _rows_3(name: str, one: Descent, effort: Effort) -> list[tuple[str, str]]:
    last = [least[-1] for least in one.least]
    return [
        (f"{name}: least eigenvalue of ∇²f(x_1)", f"{one.dip:.2g}"),
        (f"{name}: ‖∇f‖² at the start, least", f"{one.least[0][0]:.2g}, {min(last):.1g} to {max(last):.1g}"),
        (f"{name}: slope of the least", spread(one.slopes(one.least))),
        (f"{name}: slope of the weighted mean", spread(one.slopes(one.mean))),
        (f"{name}: eigenvalues of B⁻¹", within(one.runs)),
        (f"{name}: runs that diverge", lost(one.runs, effort)),
    ]


def _verdict_3(settings: dict[str, Descent], effort: Effort) -> str:
    line, exact, noisy = (float(np.mean(one.slopes(one.mean))) for one in settings.values())
    order = "at least as fast as" if line <= reference_slope(effort.rounds) else "more slowly than"
    return (
        f"Where κ and κ̄ are known (d = 1) the weighted mean falls like K^{line:.2f}, {order} ln K/√K, with exact "
        f"gradients in five dimensions like K^{exact:.2f}; with mini-batches in five dimensions like K^{noisy:.2f}, "
        f"where the eigenvalues of B⁻¹ range from {within(settings['d = 5, mini-batches'].runs)}."
    )
