"""Theorems 2.1 and 3.1: how fast FedSSO converges with the step sizes that they ask for.

Both need bounds kappa, kappa_bar of the eigenvalues of B^-1. In one dimension B is a number that
the curvature rule keeps between lam and Lam, so they are 1/Lam and 1/lam; there the theorems can be
tested as they stand. In five dimensions the same runs show what becomes of the bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...algorithm.schedule import Decay, at, theorem_2, theorem_3
from ...algorithms import FedSSO
from .watch import (
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
PERIOD = 200  # the paper's R
EXACT, NOISY, RESET = (
    "d = 5, exact gradients",
    "d = 5, mini-batches",
    f"d = 5, mini-batches, R = {PERIOD}",
)
LINE = "d = 1, mini-batches"
TAIL = 10  # the round from which on a gap is no longer that of the start
BEND = 0.1541  # a bound of the second derivative of (sigmoid(z) - y)^2 for y = 0 or 1


def record(
    steps: tuple[Decay, Decay], lam: float = 1e-4, Lam: float = 9999.0, R: int | None = None
) -> FedSSO:
    """The paper's algorithm, with a matrix that can be looked at."""
    return FedSSO(
        alpha=steps[0], eta=steps[1], lam=lam, Lam=Lam, R=R, form="bfgs-dense", guard="none"
    )


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
    """Theorem 2.1 on the convex problem; the printed nu has mu where L is needed, and beta mu - 1
    for beta u - 1."""
    L, away = one.smoothness(0.25), float((one.options["init"] - minimiser(one)[0]).square().sum())
    steps = theorem_2(
        L=L, mu=MU, tau=TAU, clients=CLIENTS, kappa=KAPPA, kappa_bar=KAPPA_BAR, printed=printed
    )
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

    def share(self, first: int = 1) -> float:
        """The largest ratio of the seeds' mean gap to the bound from a round on."""
        mean: Array = np.mean(self.gaps, axis=0)
        return float((mean / self.promise.bound(self.runs[0]["k"]))[first - 1 :].max())

    @property
    def last(self) -> float:
        """The mean gap over the last 5 % of the rounds."""
        tail = max(1, len(self.gaps[0]) // 20)
        return float(np.mean([gap[-tail:].mean() for gap in self.gaps]))

    @property
    def overridden(self) -> float:
        """The share of pairs with an overridden cur."""
        return float(np.mean([run["overridden"] for run in self.runs]))

    def facts(self, claim: str, name: str) -> list[Fact]:
        """The curves of every seed, and the slopes."""
        out = [
            Fact(claim, f"slope, {name}", i, None, v)
            for i, v in zip(self.seeds, self.slopes, strict=True)
        ]
        for i, run, gap in zip(self.seeds, self.runs, self.gaps, strict=True):
            out += curve(claim, f"gap, {name}", i, run["k"], gap)
        k = self.runs[0]["k"]
        return out + curve(claim, f"bound, {name}", None, k, self.promise.bound(k))


def in_one_dimension(effort: Effort, *, printed: bool, batch: int | None = 1) -> Tested:
    """Runs in one dimension, with mini-batches of one row if not told otherwise."""
    one = convex(1, batch, effort)
    best, plan = minimiser(one)[1], promise(one, printed)
    runs = every(one, record(plan.steps, LAM, LAM_BAR), effort)
    return Tested(plan, [run["f"] - best for run in runs], runs, effort.seeds[: len(runs)])


def in_five_dimensions(batch: int | None, R: int | None, effort: Effort) -> list[Seen]:
    """The corrected schedule, with the bounds of B^-1 that hold in one dimension."""
    one = convex(5, batch, effort)
    return every(one, record(promise(one).steps, LAM, LAM_BAR, R), effort)


def theorem_2_1(effort: Effort) -> Section:
    """Both schedules in one dimension, the corrected one in five as well."""
    right, wrong = (in_one_dimension(effort, printed=printed) for printed in (False, True))
    exact = in_one_dimension(effort, printed=False, batch=None)
    settings = {EXACT: (None, None), NOISY: (5, None), RESET: (5, PERIOD)}
    five = {name: in_five_dimensions(*setting, effort) for name, setting in settings.items()}
    claim = "Theorem 2.1"
    facts = right.facts(claim, "corrected schedule") + wrong.facts(claim, "printed schedule")
    for name, runs in {LINE: right.runs, **five}.items():
        facts += ends(claim, name, runs, effort)
    return Section(
        f"{claim}: order 1/k on strongly convex functions",
        "With η_k = β/(k+γ), β = 2/μ, 1/γ = min{NL/(2κμ), μ/(2L)} and α_k = η_k Lκ̄²/(μτκ), E f(x_k) − f* ≤ ν/(k+γ); "
        "κ and κ̄ bound the eigenvalues of B⁻¹. The proof needs β·u > 1 for u = κμ²/(NL), and α_1 "
        "≤ 1/L.",
        f"L2-regularised logistic regression (penalty {MU:g}, rows of length ≤ 1), {CLIENTS} clients with models of "
        f"their own, τ = {TAU}, {effort.rounds} rounds, {len(effort.seeds)} seeds, mini-batches of "
        f"one row, "
        f"λ = {LAM:g}, Λ = {LAM_BAR:g}. The schedule as printed, and the corrected one: β = "
        f"2NL/(κμ²), "
        "γ = max{2, βL²κ̄²/(μτκ)}, and ν with L/2 in place of μ/2. The problem was chosen for a "
        "small γ, which grows "
        "like N (L/μ)³ (κ̄/κ)²/τ: hence a large penalty, and one dimension, where κ = 1/Λ and κ̄ = "
        "1/λ are proved "
        "bounds. Slopes are of log gap on log(k+γ) over the last decade. The runs in five "
        "dimensions have the "
        f"same λ, Λ, κ and κ̄; their mini-batches are of 5 rows, without the reset of B and with R "
        f"= {PERIOD}. All "
        "others are without the reset. At k = 1 the ratio of gap to bound is fixed by the choice "
        "of ν, so it is also "
        f"given from k = {TAIL} on.",
        [
            *_rows_2(right, wrong, five, effort),
            (
                "d = 1, exact gradients, corrected: pairs with an overridden cur",
                f"{exact.overridden:.1%}",
            ),
        ],
        f"{_verdict_2(right, wrong)} {_constant(right, exact)} {_verdict_2_five(five, effort)}",
        facts,
    )


def _rows_2(
    right: Tested, wrong: Tested, five: dict[str, list[Seen]], effort: Effort
) -> list[tuple[str, str]]:
    rows = []
    for name, one in (("corrected", right), ("printed", wrong)):
        rows += [
            (
                f"{name}: β·u, α_1·L, γ",
                f"{one.promise.beta_u:.3g}, {one.promise.alpha_L:.3g}, {one.promise.steps[1].shift:.3g}",
            ),
            (
                f"{name}: slope of each seed's gap, of the mean gap",
                f"{spread(one.slopes)}, {one.mean_slope:.2f}",
            ),
            (
                f"{name}: gap at the start, mean over the last 5 % of the rounds",
                f"{one.gaps[0][0]:.3g}, {one.last:.2g}",
            ),
            (
                f"{name}: largest mean gap / bound, from k = {TAIL} on",
                f"{one.share():.3g}, {one.share(TAIL):.2g}",
            ),
            (f"{name}: eigenvalues of B⁻¹ (κ = {KAPPA:g}, κ̄ = {KAPPA_BAR:g})", within(one.runs)),
            (f"{name}: pairs with an overridden cur", f"{one.overridden:.1%}"),
        ]
    for name, runs in five.items():
        rows += [
            (f"{name}: eigenvalues of B⁻¹", within(runs)),
            (f"{name}: runs that diverge", lost(runs, effort)),
        ]
    return rows


def _verdict_2(right: Tested, wrong: Tested) -> str:
    held = all(
        run["low"].min() >= KAPPA - 1e-9 and run["high"].max() <= KAPPA_BAR + 1e-9
        for run in right.runs
    )
    ratio = right.last / wrong.last
    return (
        f"In one dimension, where κ and κ̄ {'hold' if held else 'should hold, but do not'}, the "
        f"gap "
        f"{'stays below' if right.share() <= 1 else 'exceeds'} the corrected bound (from k = "
        f"{TAIL} on it is at most "
        f"{right.share(TAIL):.2g} of it) and falls like k^{np.mean(right.slopes):.2f}. As printed "
        f"β·u = "
        f"{wrong.promise.beta_u:.2f} "
        f"{'is not > 1, so the proof says nothing' if wrong.promise.beta_u <= 1 else 'is > 1'}, "
        f"and the gap reaches "
        f"{wrong.share():.2g} times the printed bound; yet it falls like "
        f"k^{np.mean(wrong.slopes):.2f} and ends "
        f"{max(ratio, 1 / ratio):.2g} times {'smaller' if ratio > 1 else 'larger'} than with the "
        f"corrected schedule."
    )


def _constant(right: Tested, exact: Tested) -> str:
    """What overridden pairs make of B in one dimension."""
    of_whom = (
        "mainly that of FedAvg with a constant server scaling"
        if right.overridden > 0.5
        else "mainly that of FedSSO"
    )
    batches = (
        "so larger batches would not help"
        if exact.overridden > 0.5
        else "so larger batches would help"
    )
    return (
        f"But {right.overridden:.1%} of the pairs are overridden, which sets B⁻¹ to 2/(λ+Λ) = "
        f"{2 / (LAM + LAM_BAR):.3g}"
        f": the rate is {of_whom} (with exact gradients it is {exact.overridden:.1%}, {batches})."
    )


def _verdict_2_five(five: dict[str, list[Seen]], effort: Effort) -> str:
    return (
        f"In five dimensions with mini-batches B⁻¹ has eigenvalues from {within(five[NOISY])} "
        f"without the reset "
        f"({lost(five[NOISY], effort)} runs diverge) and from {within(five[RESET])} with R = "
        f"{PERIOD} "
        f"({lost(five[RESET], effort)}), against κ = {KAPPA:g} and κ̄ = {KAPPA_BAR:g}."
    )


# ---- Theorem 3.1 ----


def squashed(outputs: Tensor, targets: Tensor) -> Tensor:
    """(sigmoid(z) - y)^2: bounded, smooth and not convex."""
    return (torch.sigmoid(outputs[:, 0]) - targets) ** 2


def bumpy(dim: int, batch: int | None, effort: Effort) -> Problem:
    """A function that is not convex at the start, with a small penalty that keeps the models
    bounded."""
    return problem(squashed, dim, batch, effort, scale=4.0, l2=0.01, start=1.0)


class Descent(NamedTuple):
    """The squared gradient over the rounds of one setting."""

    dip: float  # least eigenvalue of the Hessian at the start
    least: list[Array]  # its minimum so far, of each seed
    mean: list[Array]  # its mean so far with weights eta_k
    total: list[Array]  # its sum so far with weights eta_k, which is what the proof bounds
    runs: list[Seen]
    rounds: int

    def ended(self, of: Sequence[Array]) -> list[Array]:
        """The curves of the runs that reach the end."""
        return [v for v in of if len(v) == self.rounds]

    def slopes(self, of: Sequence[Array]) -> list[float]:
        """Of log value on log K over the last decade."""
        return [slope(np.arange(1.0, self.rounds + 1), v) for v in self.ended(of)]

    @property
    def growth(self) -> list[float]:
        """The factor by which the sum grows over the last decade."""
        return [float(v[-1] / v[decade(self.rounds) - 1]) for v in self.ended(self.total)]

    @property
    def late(self) -> list[float]:
        """The mean over the second half of the rounds."""
        return [
            float(v[self.rounds // 2 :].mean())
            for v in self.ended([run["square"] for run in self.runs])
        ]

    @property
    def met(self) -> bool:
        """Whether no run diverges and no sum grows faster than ln K."""
        return len(self.growth) == len(self.runs) and max(self.growth) <= log_growth(self.rounds)


def decade(rounds: int) -> int:
    """Where the last decade of rounds begins."""
    return max(2, rounds // 10)


def log_growth(rounds: int) -> float:
    """The growth of ln K over the last decade."""
    return log(rounds) / log(decade(rounds))


def weights(k: Array) -> Array:
    """eta_k of the corrected schedule."""
    eta: Array = (k + 1) ** -0.5
    return eta


def descent(
    one: Problem, effort: Effort, lam: float = 1e-4, Lam: float = 9999.0, R: int | None = None
) -> Descent:
    """Runs with the corrected schedule of Theorem 3.1."""
    steps = theorem_3(L=one.smoothness(BEND), tau=TAU)
    runs = every(one, record(steps, lam, Lam, R), effort)
    total = [np.cumsum(weights(run["k"]) * run["square"]) for run in runs]
    mean = [v / np.cumsum(weights(run["k"])) for v, run in zip(total, runs, strict=True)]
    least = [np.minimum.accumulate(run["square"]) for run in runs]
    return Descent(_dip(one), least, mean, total, runs, effort.rounds)


def _dip(one: Problem) -> float:
    start = one.simulation(FedSSO(), 1, 0)
    f, batch = whole(one, start)
    return float(torch.linalg.eigvalsh(f.hessian(start.server.x[None], batch)).min())


def theorem_3_1(effort: Effort) -> Section:
    """The squared gradient in one dimension, where kappa and kappa_bar are known, and in five."""
    settings = {
        LINE: descent(bumpy(1, 1, effort), effort, 0.25, 4.0),
        EXACT: descent(bumpy(5, None, effort), effort),
        NOISY: descent(bumpy(5, 5, effort), effort),
        RESET: descent(bumpy(5, 5, effort), effort, R=PERIOD),
    }
    claim = "Theorem 3.1"
    facts: list[Fact] = []
    for name, one in settings.items():
        for quantity, curves in (("least", one.least), ("mean", one.mean), ("sum of", one.total)):
            for seed, run, values in zip(effort.seeds, one.runs, curves, strict=False):
                facts += curve(
                    claim, f"{quantity} squared gradient, {name}", seed, run["k"], values
                )
        facts += ends(claim, name, one.runs, effort)
    return Section(
        f"{claim}: squared gradients on functions that are not convex",
        "With α_k = 1/(2√6 τLk) and η_k = 1/√k, min over k ≤ K of ‖∇f(x_k)‖² falls like 1/√K plus terms of order 1/K "
        "and 1/K². (Summed as they stand the proof's terms give ln K/√K, and Θ_1 = 1 makes the "
        "bound infinite.)",
        f"Loss (sigmoid(z) − y)² with penalty 0.01, {CLIENTS} clients, τ = {TAU}, {effort.rounds} rounds, "
        f"{len(effort.seeds)} seeds (one where gradients are exact), from a point where f is not "
        f"convex. d = 1: "
        "mini-batches of one row, λ = 0.25, Λ = 4, so that κ = 0.25, κ̄ = 4. d = 5: λ = 1e-4, Λ = "
        "9999 as in the "
        "paper, exact gradients or mini-batches of 5; without the reset of B, mini-batches also "
        "with R = "
        f"{PERIOD}. α_k and η_k with k + 1 for k, so that Θ_1 = 1/4. What the proof bounds is Σ "
        f"η_k‖∇f(x_k)‖²: 1/√K "
        "needs it bounded, ln K/√K lets it grow like ln K. Slopes and growth over the last decade, "
        "of runs that do "
        f"not diverge; there ln K grows by a factor of {log_growth(effort.rounds):.2f}. The slope "
        f"of the mean with "
        f"weights η_k says less: a gradient in round 1 alone, and zero after it, has "
        f"{floor_slope(effort.rounds):.3f}.",
        [row for name, one in settings.items() for row in _rows_3(name, one, effort)],
        _verdict_3(settings, effort),
        facts,
    )


def floor_slope(rounds: int) -> float:
    """The slope of the weighted mean over the last decade if all gradients but the first are zero."""
    k = np.arange(1.0, rounds + 1)
    return slope(k, 1 / np.cumsum(weights(k)))


def _rows_3(name: str, one: Descent, effort: Effort) -> list[tuple[str, str]]:
    return [
        (f"{name}: least eigenvalue of ∇²f(x_1)", f"{one.dip:.2g}"),
        (
            f"{name}: ‖∇f‖² at the start, least",
            f"{one.least[0][0]:.2g}, {_range([v[-1] for v in one.least])}",
        ),
        (f"{name}: slope of the least", spread(one.slopes(one.least))),
        (
            f"{name}: Σ η_k‖∇f‖², its growth",
            f"{_range([v[-1] for v in one.total])}, {spread(one.growth)}",
        ),
        (f"{name}: mean ‖∇f‖² over the second half", _range(one.late)),
        (
            f"{name}: slope of the weighted mean, its floor",
            f"{spread(one.slopes(one.mean), 3)}, {floor_slope(effort.rounds):.3f}",
        ),
        (f"{name}: eigenvalues of B⁻¹", within(one.runs)),
        (f"{name}: runs that diverge", lost(one.runs, effort)),
    ]


def _range(values: Sequence[float]) -> str:
    return (
        f"{min(values):.2g} to {max(values):.2g}"
        if len(set(values)) > 1
        else "".join(f"{v:.2g}" for v in values[:1])
    )


def _verdict_3(settings: dict[str, Descent], effort: Effort) -> str:
    told = "; ".join(f"{name}: {_told(one, effort)}" for name, one in settings.items())
    return (
        f"Σ η_k‖∇f(x_k)‖² over the last decade of K, in which ln K grows by "
        f"{log_growth(effort.rounds):.2f}: {told}. "
        f"Eigenvalues of B⁻¹ in five dimensions with mini-batches: {within(settings[NOISY].runs)} "
        f"without the reset, "
        f"{within(settings[RESET].runs)} with R = {PERIOD}."
    )


def _told(one: Descent, effort: Effort) -> str:
    if not one.growth:
        return f"no run reaches the end (they stop in rounds {_range([len(run['k']) for run in one.runs])})"
    faster = sum(growth > log_growth(one.rounds) for growth in one.growth)
    order = "the theorem's order" if one.met else "not the theorem's order"
    return (
        f"it grows by {spread(one.growth)} ({faster} of {len(one.runs)} runs faster than ln K, "
        f"{lost(one.runs, effort)} diverge: {order})"
    )
