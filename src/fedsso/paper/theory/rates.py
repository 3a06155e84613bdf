"""Theorems 2.1 and 3.1: how fast FedSSO converges with the step sizes that they ask for.

Both need bounds kappa and kappa_bar of the eigenvalues of B^-1. In one dimension B is a number that
the curvature rule keeps between lam and Lam, so the bounds are 1/Lam and 1/lam: there the theorems
can be tested as they stand. In five dimensions the same runs show what becomes of the bounds.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ...algorithm.schedule import Decay, at, theorem_2, theorem_3
from ...algorithms import FedSSO
from .claims import (
    EXACT,
    KAPPA,
    KAPPA_BAR,
    LAM,
    LAM_BAR,
    LINE,
    NOISY,
    PERIOD,
    RESET,
    Array,
    Effort,
    Fact,
    Section,
    curve,
    slope,
    spread,
)
from .watch import CLIENTS, TAU, Problem, Seen, bumpy, minimiser, problem, watch, whole, within

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Rows = list[tuple[str, str]]  # quantity, measured

MU = 1.0
"""The L2 penalty of the convex problem, which is the paper's mu: f is mu-strongly convex."""
TAIL = 10
"""From this round on, a gap no longer depends on the start."""
BEND = 0.1541
"""A bound of the second derivative of (sigmoid(z) - y)^2 for y = 0 or 1."""


def record(
    steps: tuple[Decay, Decay], lam: float = 1e-4, Lam: float = 9999.0, R: int | None = None
) -> FedSSO:
    """The paper's algorithm with the schedules (alpha, eta), and with B kept as a matrix.

    Args:
        steps: The schedules of the client step and of the server step.
        lam: The lower bound of the curvature rule, the paper's lambda.
        Lam: Its upper bound, the paper's Lambda.
        R: B is reset every R rounds. None: never.
    """
    alpha, eta = steps
    return FedSSO(
        alpha=alpha,
        eta=eta,
        lam=lam,
        Lam=Lam,
        R=R,
        form="bfgs-dense",
        guard="none",
    )


def every(
    one: Problem,
    chosen: FedSSO,
    effort: Effort,
) -> list[Seen]:
    """Run FedSSO on a problem once for each seed of the effort.

    Where gradients are exact, seeds make no difference: then there is one run, with the first seed.
    A run that diverges is shorter than `effort.rounds`.
    """
    seeds = effort.seeds
    if one.options["batch_size"] is None:
        seeds = seeds[:1]
    return [watch(one, chosen, effort.rounds, seed) for seed in seeds]


def ends(
    claim: str,
    setting: str,
    runs: Sequence[Seen],
    effort: Effort,
) -> list[Fact]:
    """The smallest and the largest eigenvalue of B^-1 by round, as facts.

    `setting` names the runs in theory.csv and in the figure.
    """
    facts = []
    for seed, run in zip(effort.seeds, runs, strict=False):
        for name, end in (("smallest", "low"), ("largest", "high")):
            quantity = f"{name} eigenvalue of B^-1, {setting}"
            facts += curve(claim, quantity, seed, run["k"], run[end])
    return facts


def lost(runs: Sequence[Seen], effort: Effort) -> str:
    """How many runs diverged, as text, for example "1 of 5".

    A run that diverged has fewer rounds than asked for.
    """
    short = [run for run in runs if len(run["k"]) < effort.rounds]
    return f"{len(short)} of {len(runs)}"


# ---- Theorem 2.1 ----


class Promise(NamedTuple):
    """What Theorem 2.1 promises for one problem.

    It prescribes both step sizes and then bounds the gap f(x_k) - f* by nu / (k + gamma). The last
    two fields are conditions of its proof, so that a schedule can be checked against them.
    """

    steps: tuple[Decay, Decay]
    """The step sizes alpha_k of the clients and eta_k of the server."""
    nu: float
    """The numerator of the bound."""
    beta_u: float
    """beta u with u = kappa mu^2 / (N L). The proof needs it to be above 1."""
    alpha_L: float
    """alpha_1 L. The proof needs it to be at most 1."""

    @property
    def gamma(self) -> float:
        """The shift of both schedules: eta_k = beta / (k + gamma)."""
        return float(self.steps[1].shift)

    def bound(self, k: Array) -> Array:
        """The promised f(x_k) - f* for rounds k."""
        bound: Array = self.nu / (k + self.gamma)
        return bound


def promise(one: Problem, printed: bool = False) -> Promise:
    """Theorem 2.1 on the convex problem: its step sizes, its bound and its conditions.

    With `printed` the step sizes and nu are those that the paper prints. They do not follow from
    its proof: nu has mu where L is needed, and beta mu - 1 where beta u - 1 is needed, and beta is
    too small for beta u > 1. Otherwise all three are corrected.
    """
    L = one.smoothness(0.25)
    away = float((one.options["init"] - minimiser(one)[0]).square().sum())  # ||x_1 - x*||^2
    steps = theorem_2(
        L=L,
        mu=MU,
        tau=TAU,
        clients=CLIENTS,
        kappa=KAPPA,
        kappa_bar=KAPPA_BAR,
        printed=printed,
    )
    alpha, eta = steps
    beta = float(eta.scale)
    gamma = float(eta.shift)
    beta_u = beta * KAPPA * MU**2 / (CLIENTS * L)
    Gamma = L**2 * KAPPA_BAR**2 * one.variance() / (2 * MU * TAU)
    contraction = beta * MU if printed else beta_u
    bend = MU if printed else L
    noise = beta**2 * Gamma / (contraction - 1)
    nu = max(noise, bend / 2 * (gamma + 1) * away)
    return Promise(
        steps,
        nu,
        beta_u,
        float(at(alpha, 1)) * L,
    )


def convex(
    dim: int,
    batch: int | None,
    effort: Effort,
) -> Problem:
    """The function of Theorem 2.1: L2-regularised logistic regression in `dim` dimensions.

    It meets all assumptions of the theorem: it is smooth and strongly convex, and its gradients
    have a bounded variance. With batch=None gradients are exact.
    """
    return problem("bce", dim, batch, effort, scale=1.0, l2=MU, start=2.0)


class Tested(NamedTuple):
    """The runs of one schedule of Theorem 2.1 in one dimension, and what is read from them.

    In one dimension kappa and kappa_bar are proved bounds, so the theorem can be held to its word.
    """

    promise: Promise
    """The schedule and its bound."""
    gaps: list[Array]
    """f(x_k) - f* over the rounds, for each seed."""
    runs: list[Seen]
    """The runs themselves, in the same order."""
    seeds: tuple[int, ...]
    """The seeds of the runs."""

    @property
    def slopes(self) -> list[float]:
        """For each seed, the slope of log gap on log(k + gamma) over the last decade of rounds.

        The theorem's order 1/k is a slope of -1.
        """
        return [self._slope(gap) for gap in self.gaps]

    @property
    def mean_slope(self) -> float:
        """The same slope for the mean gap of all seeds."""
        return self._slope(np.mean(self.gaps, axis=0))

    def _slope(self, gap: Array) -> float:
        """The slope of one gap; all runs have the same rounds."""
        return slope(self.runs[0]["k"] + self.promise.gamma, gap)

    def share(self, first: int = 1) -> float:
        """The largest ratio of the seeds' mean gap to the bound, from round `first` on.

        The bound holds where this is at most 1. The theorem bounds an expectation, hence the mean.
        """
        mean: Array = np.mean(self.gaps, axis=0)
        ratio = mean / self.promise.bound(self.runs[0]["k"])
        return float(ratio[first - 1 :].max())

    @property
    def last(self) -> float:
        """The mean gap over the last 5 % of the rounds."""
        tail = max(1, len(self.gaps[0]) // 20)
        return float(np.mean([gap[-tail:].mean() for gap in self.gaps]))

    @property
    def overridden(self) -> float:
        """The share of pairs (s, y) whose cur was overridden by the curvature rule.

        In one dimension an overridden pair sets B to (lam + Lam) / 2, whatever the function is.
        """
        return float(np.mean([run["overridden"] for run in self.runs]))

    def facts(self, claim: str, name: str) -> list[Fact]:
        """The slopes and the gaps of every seed, and the bound, as facts.

        `name` tells the schedules apart in theory.csv and in the figure.
        """
        facts = []
        for seed, value in zip(self.seeds, self.slopes, strict=True):
            facts.append(Fact(claim, f"slope, {name}", seed, None, value))
        for seed, run, gap in zip(self.seeds, self.runs, self.gaps, strict=True):
            facts += curve(claim, f"gap, {name}", seed, run["k"], gap)
        k = self.runs[0]["k"]
        return facts + curve(
            claim,
            f"bound, {name}",
            None,
            k,
            self.promise.bound(k),
        )


def in_one_dimension(
    effort: Effort,
    *,
    printed: bool,
    batch: int | None = 1,
) -> Tested:
    """Run a schedule of Theorem 2.1, printed or corrected, in one dimension.

    Mini-batches have one row; with batch=None gradients are exact.
    """
    one = convex(1, batch, effort)
    _, best = minimiser(one)
    plan = promise(one, printed)
    runs = every(one, record(plan.steps, LAM, LAM_BAR), effort)
    gaps = [run["f"] - best for run in runs]
    return Tested(plan, gaps, runs, effort.seeds[: len(runs)])


def in_five_dimensions(
    batch: int | None,
    R: int | None,
    effort: Effort,
) -> list[Seen]:
    """Run the corrected schedule of Theorem 2.1 in five dimensions.

    kappa and kappa_bar are those of one dimension. Here they are no proved bounds any more, and
    the runs show how far the eigenvalues of B^-1 leave them. With `R` the matrix B is reset every
    R rounds.
    """
    one = convex(5, batch, effort)
    return every(one, record(promise(one).steps, LAM, LAM_BAR, R), effort)


def theorem_2_1(effort: Effort) -> Section:
    """Test Theorem 2.1: the rate 1/k on strongly convex functions.

    Both schedules are run in one dimension with mini-batches, the corrected one also with exact
    gradients, and in five dimensions with and without the reset of B.
    """
    claim = "Theorem 2.1"
    right = in_one_dimension(effort, printed=False)
    wrong = in_one_dimension(effort, printed=True)
    exact = in_one_dimension(effort, printed=False, batch=None)
    five = {
        EXACT: in_five_dimensions(None, None, effort),
        NOISY: in_five_dimensions(5, None, effort),
        RESET: in_five_dimensions(5, PERIOD, effort),
    }
    facts = right.facts(claim, "corrected schedule") + wrong.facts(claim, "printed schedule")
    for name, runs in {LINE: right.runs, **five}.items():
        facts += ends(claim, name, runs, effort)
    return Section(
        f"{claim}: order 1/k on strongly convex functions",
        "With η_k = β/(k+γ), β = 2/μ, 1/γ = min{NL/(2κμ), μ/(2L)} and α_k = η_k Lκ̄²/(μτκ), "
        "E f(x_k) − f* ≤ ν/(k+γ); κ and κ̄ bound the eigenvalues of B⁻¹. The proof needs β·u > 1 "
        "for u = κμ²/(NL), and α_1 ≤ 1/L.",
        _did_2(effort),
        _rows_2(right, wrong, exact, five, effort),
        f"{_verdict_2(right, wrong)} {_constant(right, exact)} {_verdict_2_five(five, effort)}",
        facts,
    )


def _did_2(effort: Effort) -> str:
    """What was done to test Theorem 2.1."""
    return (
        f"L2-regularised logistic regression (penalty {MU:g}, rows of length ≤ 1), {CLIENTS} "
        f"clients with models of their own, τ = {TAU}, {effort.rounds} rounds, "
        f"{len(effort.seeds)} seeds, mini-batches of one row, λ = {LAM:g}, Λ = {LAM_BAR:g}. "
        "The schedule as printed, and the corrected one: β = 2NL/(κμ²), "
        "γ = max{2, βL²κ̄²/(μτκ)}, and ν with L/2 in place of μ/2. The problem was chosen for a "
        "small γ, which grows like N (L/μ)³ (κ̄/κ)²/τ: hence a large penalty, and one dimension, "
        "where κ = 1/Λ and κ̄ = 1/λ are proved bounds. Slopes are of log gap on log(k+γ) over the "
        "last decade. The runs in five dimensions have the same λ, Λ, κ and κ̄; their "
        "mini-batches are of 5 rows, without the reset of B and with R "
        f"= {PERIOD}. All others are without the reset. At k = 1 the ratio of gap to bound is "
        f"fixed by the choice of ν, so it is also given from k = {TAIL} on."
    )


def _rows_2(
    right: Tested,
    wrong: Tested,
    exact: Tested,
    five: Mapping[str, list[Seen]],
    effort: Effort,
) -> Rows:
    """The table of Theorem 2.1.

    `right` and `wrong` are the corrected and the printed schedule, `exact` the corrected one with
    exact gradients, `five` the runs in five dimensions by setting.
    """
    rows = _schedule_rows("corrected", right) + _schedule_rows("printed", wrong)
    for name, runs in five.items():
        rows.append((f"{name}: eigenvalues of B⁻¹", within(runs)))
        rows.append((f"{name}: runs that diverge", lost(runs, effort)))
    label = "d = 1, exact gradients, corrected: pairs with an overridden cur"
    return [*rows, (label, f"{exact.overridden:.1%}")]


def _schedule_rows(name: str, one: Tested) -> Rows:
    """The part of the table that belongs to one schedule."""
    plan = one.promise
    conditions = f"{plan.beta_u:.3g}, {plan.alpha_L:.3g}, {plan.gamma:.3g}"
    slopes = f"{spread(one.slopes)}, {one.mean_slope:.2f}"
    start = one.gaps[0][0]
    return [
        (f"{name}: β·u, α_1·L, γ", conditions),
        (f"{name}: slope of each seed's gap, of the mean gap", slopes),
        (
            f"{name}: gap at the start, mean over the last 5 % of the rounds",
            f"{start:.3g}, {one.last:.2g}",
        ),
        (
            f"{name}: largest mean gap / bound, from k = {TAIL} on",
            f"{one.share():.3g}, {one.share(TAIL):.2g}",
        ),
        (f"{name}: eigenvalues of B⁻¹ (κ = {KAPPA:g}, κ̄ = {KAPPA_BAR:g})", within(one.runs)),
        (f"{name}: pairs with an overridden cur", f"{one.overridden:.1%}"),
    ]


def _bounds_hold(runs: Sequence[Seen]) -> bool:
    """Whether the eigenvalues of B^-1 lie between kappa and kappa_bar in all rounds of all runs.

    A difference of 1e-9 is left to rounding.
    """
    above = all(run["low"].min() >= KAPPA - 1e-9 for run in runs)
    below = all(run["high"].max() <= KAPPA_BAR + 1e-9 for run in runs)
    return above and below


def _verdict_2(right: Tested, wrong: Tested) -> str:
    """What the runs in one dimension say of both schedules."""
    ratio = right.last / wrong.last
    held = "hold" if _bounds_hold(right.runs) else "should hold, but do not"
    stays = "stays below" if right.share() <= 1 else "exceeds"
    beta_u = wrong.promise.beta_u
    says = "is not > 1, so the proof says nothing" if beta_u <= 1 else "is > 1"
    size = "smaller" if ratio > 1 else "larger"
    return (
        f"In one dimension, where κ and κ̄ {held}, the gap {stays} the corrected bound "
        f"(from k = {TAIL} on it is at most {right.share(TAIL):.2g} of it) "
        f"and falls like k^{np.mean(right.slopes):.2f}. "
        f"As printed β·u = {beta_u:.2f} {says}, "
        f"and the gap reaches {wrong.share():.2g} times the printed bound; "
        f"yet it falls like k^{np.mean(wrong.slopes):.2f} "
        f"and ends {max(ratio, 1 / ratio):.2g} times {size} than with the corrected schedule."
    )


def _constant(right: Tested, exact: Tested) -> str:
    """What overridden pairs make of B in one dimension.

    An overridden pair makes B a constant, and with a constant B the algorithm is FedAvg with a
    scaled step.
    """
    of_whom = "mainly that of FedSSO"
    if right.overridden > 0.5:
        of_whom = "mainly that of FedAvg with a constant server scaling"
    help_ = "would not help" if exact.overridden > 0.5 else "would help"
    return (
        f"But {right.overridden:.1%} of the pairs are overridden, "
        f"which sets B⁻¹ to 2/(λ+Λ) = {2 / (LAM + LAM_BAR):.3g}: the rate is {of_whom} "
        f"(with exact gradients it is {exact.overridden:.1%}, so larger batches {help_})."
    )


def _verdict_2_five(five: Mapping[str, list[Seen]], effort: Effort) -> str:
    """What becomes of the bounds of B^-1 in five dimensions."""
    noisy = five[NOISY]
    reset = five[RESET]
    return (
        f"In five dimensions with mini-batches B⁻¹ has eigenvalues from {within(noisy)} "
        f"without the reset ({lost(noisy, effort)} runs diverge) "
        f"and from {within(reset)} with R = {PERIOD} "
        f"({lost(reset, effort)}), against κ = {KAPPA:g} and κ̄ = {KAPPA_BAR:g}."
    )


# ---- Theorem 3.1 ----


class Descent(NamedTuple):
    """The squared gradient ||grad f(x_k)||^2 over the rounds of one setting of Theorem 3.1.

    Each list has one curve for each run, with one value for each round. Runs that diverge have
    shorter curves.
    """

    dip: float
    """The least eigenvalue of the Hessian at the start."""
    least: list[Array]
    """The minimum so far."""
    mean: list[Array]
    """The mean so far with weights eta_k."""
    total: list[Array]
    """The sum so far with weights eta_k, which is what the proof bounds."""
    runs: list[Seen]
    """The runs themselves, one for each seed."""
    rounds: int
    """How many rounds a run has if it does not diverge."""

    def ended(self, curves: Sequence[Array]) -> list[Array]:
        """The curves of the runs that reach the last round."""
        return [values for values in curves if len(values) == self.rounds]

    def slopes(self, curves: Sequence[Array]) -> list[float]:
        """For each run that reaches the end, the slope of log value on log K in the last decade."""
        k = np.arange(1.0, self.rounds + 1)
        return [slope(k, values) for values in self.ended(curves)]

    @property
    def growth(self) -> list[float]:
        """For each run that reaches the end, the factor by which its sum grows in the last decade.

        If the theorem's order 1/sqrt(K) holds, the sum is bounded and the factor is near 1. With
        the weaker order ln K / sqrt(K) it is at most `log_growth`.
        """
        first = decade(self.rounds) - 1
        return [float(values[-1] / values[first]) for values in self.ended(self.total)]

    @property
    def late(self) -> list[float]:
        """For each run that reaches the end, the mean over the second half of the rounds."""
        half = self.rounds // 2
        squares = self.ended([run["square"] for run in self.runs])
        return [float(values[half:].mean()) for values in squares]

    @property
    def met(self) -> bool:
        """Whether no run diverges and no sum grows faster than ln K, the theorem's order."""
        if len(self.growth) < len(self.runs):
            return False
        return max(self.growth) <= log_growth(self.rounds)


def decade(rounds: int) -> int:
    """The round in which the last decade of rounds begins."""
    return max(2, rounds // 10)


def log_growth(rounds: int) -> float:
    """The factor by which ln K grows over the last decade."""
    return log(rounds) / log(decade(rounds))


def weights(k: Array) -> Array:
    """eta_k of the corrected schedule of Theorem 3.1."""
    eta: Array = (k + 1) ** -0.5
    return eta


def descent(
    one: Problem, effort: Effort, lam: float = 1e-4, Lam: float = 9999.0, R: int | None = None
) -> Descent:
    """Run the corrected schedule of Theorem 3.1 on a problem and collect the squared gradients.

    Args:
        one: The problem.
        effort: The rounds and the seeds.
        lam: The lower bound of the curvature rule.
        Lam: Its upper bound.
        R: B is reset every R rounds. None: never.
    """
    steps = theorem_3(L=one.smoothness(BEND), tau=TAU)
    runs = every(one, record(steps, lam, Lam, R), effort)
    least = []
    mean = []
    total = []
    for run in runs:
        eta = weights(run["k"])
        so_far = np.cumsum(eta * run["square"])
        least.append(np.minimum.accumulate(run["square"]))
        mean.append(so_far / np.cumsum(eta))
        total.append(so_far)
    return Descent(_dip(one), least, mean, total, runs, effort.rounds)


def _dip(one: Problem) -> float:
    """The least eigenvalue of the Hessian at the initial model.

    It is negative: the problem was chosen to be not convex there.
    """
    start = one.simulation(FedSSO(), 1, 0)
    f, batch = whole(one, start)
    return float(torch.linalg.eigvalsh(f.hessian(start.server.x[None], batch)).min())


def theorem_3_1(effort: Effort) -> Section:
    """Test Theorem 3.1: squared gradients on functions that are not convex.

    One dimension, where kappa and kappa_bar are known, and five, with exact gradients and with
    mini-batches, the latter with and without the reset of B.
    """
    claim = "Theorem 3.1"
    settings = {
        LINE: descent(bumpy(1, 1, effort), effort, 0.25, 4.0),
        EXACT: descent(bumpy(5, None, effort), effort),
        NOISY: descent(bumpy(5, 5, effort), effort),
        RESET: descent(bumpy(5, 5, effort), effort, R=PERIOD),
    }
    rows: Rows = []
    facts: list[Fact] = []
    for name, one in settings.items():
        rows += _rows_3(name, one, effort)
        facts += _facts_3(claim, name, one, effort)
    return Section(
        f"{claim}: squared gradients on functions that are not convex",
        "With α_k = 1/(2√6 τLk) and η_k = 1/√k, min over k ≤ K of ‖∇f(x_k)‖² falls like 1/√K "
        "plus terms of order 1/K and 1/K². (Summed as they stand the proof's terms give "
        "ln K/√K, and Θ_1 = 1 makes the bound infinite.)",
        _did_3(effort),
        rows,
        _verdict_3(settings, effort),
        facts,
    )


def _did_3(effort: Effort) -> str:
    """What was done to test Theorem 3.1."""
    return (
        f"Loss (sigmoid(z) − y)² with penalty 0.01, {CLIENTS} clients, τ = {TAU}, "
        f"{effort.rounds} rounds, {len(effort.seeds)} seeds (one where gradients are exact), "
        "from a point where f is not convex. d = 1: mini-batches of one row, λ = 0.25, Λ = 4, "
        "so that κ = 0.25, κ̄ = 4. d = 5: λ = 1e-4, Λ = 9999 as in the paper, exact gradients or "
        "mini-batches of 5; without the reset of B, mini-batches also with R = "
        f"{PERIOD}. α_k and η_k with k + 1 for k, so that Θ_1 = 1/4. What the proof bounds is "
        "Σ η_k‖∇f(x_k)‖²: 1/√K needs it bounded, ln K/√K lets it grow like ln K. Slopes and "
        "growth over the last decade, of runs that do not diverge; there ln K grows by a factor "
        f"of {log_growth(effort.rounds):.2f}. The slope of the mean with weights η_k says less: "
        "a gradient in round 1 alone, and zero after it, has "
        f"{floor_slope(effort.rounds):.3f}."
    )


def floor_slope(rounds: int) -> float:
    """The steepest slope that the weighted mean can have in the last decade.

    It is reached if all gradients but the first are zero, so slopes near it say little.
    """
    k = np.arange(1.0, rounds + 1)
    return slope(k, 1 / np.cumsum(weights(k)))


def _facts_3(
    claim: str,
    name: str,
    one: Descent,
    effort: Effort,
) -> list[Fact]:
    """The curves of one setting, and the eigenvalues of B^-1."""
    facts: list[Fact] = []
    for quantity, curves in (("least", one.least), ("mean", one.mean), ("sum of", one.total)):
        label = f"{quantity} squared gradient, {name}"
        for seed, run, values in zip(effort.seeds, one.runs, curves, strict=False):
            facts += curve(claim, label, seed, run["k"], values)
    return facts + ends(claim, name, one.runs, effort)


def _rows_3(
    name: str,
    one: Descent,
    effort: Effort,
) -> Rows:
    """The part of the table that belongs to one setting."""
    start = one.least[0][0]
    least = _range([values[-1] for values in one.least])
    total = _range([values[-1] for values in one.total])
    mean = spread(one.slopes(one.mean), 3)
    floor = floor_slope(effort.rounds)
    return [
        (f"{name}: least eigenvalue of ∇²f(x_1)", f"{one.dip:.2g}"),
        (f"{name}: ‖∇f‖² at the start, least", f"{start:.2g}, {least}"),
        (f"{name}: slope of the least", spread(one.slopes(one.least))),
        (f"{name}: Σ η_k‖∇f‖², its growth", f"{total}, {spread(one.growth)}"),
        (f"{name}: mean ‖∇f‖² over the second half", _range(one.late)),
        (f"{name}: slope of the weighted mean, its floor", f"{mean}, {floor:.3f}"),
        (f"{name}: eigenvalues of B⁻¹", within(one.runs)),
        (f"{name}: runs that diverge", lost(one.runs, effort)),
    ]


def _range(values: Sequence[float]) -> str:
    """The smallest and the largest value as text; a single one alone, none as nothing."""
    if not values:
        return ""
    if len(set(values)) == 1:
        return f"{values[0]:.2g}"
    return f"{min(values):.2g} to {max(values):.2g}"


def _verdict_3(settings: Mapping[str, Descent], effort: Effort) -> str:
    """What the sums say of the theorem's order, setting by setting."""
    told = "; ".join(f"{name}: {_told(one, effort)}" for name, one in settings.items())
    return (
        f"Σ η_k‖∇f(x_k)‖² over the last decade of K, "
        f"in which ln K grows by {log_growth(effort.rounds):.2f}: {told}. "
        f"Eigenvalues of B⁻¹ in five dimensions with mini-batches: "
        f"{within(settings[NOISY].runs)} without the reset, "
        f"{within(settings[RESET].runs)} with R = {PERIOD}."
    )


def _told(one: Descent, effort: Effort) -> str:
    """What the sum of one setting does over the last decade, as part of a sentence.

    Without a run that reaches the end it says when they stop.
    """
    if not one.growth:
        stops = _range([len(run["k"]) for run in one.runs])
        return f"no run reaches the end (they stop in rounds {stops})"
    faster = [growth for growth in one.growth if growth > log_growth(one.rounds)]
    order = "the theorem's order" if one.met else "not the theorem's order"
    return (
        f"it grows by {spread(one.growth)} ({len(faster)} of {len(one.runs)} runs "
        f"faster than ln K, {lost(one.runs, effort)} diverge: {order})"
    )
