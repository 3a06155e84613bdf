"""The figure of the theory's claims, drawn from the facts that theory.csv holds.

It has six panels, one function each. Facts are looked up by claim and quantity, so the names of
quantities here must be those that the tests of the claims write.
"""

from __future__ import annotations

from math import pi
from typing import TYPE_CHECKING, Any

import numpy as np

from ...report.styles import FAMILIES
from .claims import (
    EXACT,
    KAPPA,
    KAPPA_BAR,
    LIMIT_ALPHAS,
    LIMIT_ROUNDS,
    LIMIT_TAU,
    LINE,
    NOISY,
    RESET,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .claims import Array, Fact

    Curve = tuple[Array, Array]  # k, value

# Colours that all figures of the package share. A setting has the same one in every panel.
ORANGE, BLUE, GREEN, OTHER = list(FAMILIES)[:4]
SETTINGS = {LINE: ORANGE, EXACT: BLUE, NOISY: GREEN, RESET: OTHER}

# Runs with the reset of B are the same as those without up to the first reset. Dashes let the
# line below show through.
OVER = (0, (4, 3))
DASHED: dict[str, Any] = {"color": "#555555", "lw": 1.2, "ls": (0, (4, 2))}
DOTTED: dict[str, Any] = {"color": "#555555", "lw": 1.2, "ls": (0, (1.2, 1.6))}


class Book:
    """The facts of one claim, found by quantity.

    A quantity that is not there gives empty arrays and lists, not an error.
    """

    def __init__(self, facts: Sequence[Fact], claim: str) -> None:
        self.facts = [fact for fact in facts if fact.claim == claim]

    def _of(self, quantity: str) -> list[Fact]:
        """The facts of a quantity, in their order."""
        return [fact for fact in self.facts if fact.quantity == quantity]

    def values(self, quantity: str) -> Array:
        """All values of a quantity, in the order of the facts."""
        return np.array([fact.value for fact in self._of(quantity)])

    def curves(self, quantity: str) -> list[Curve]:
        """For each seed, the rounds k and the values of a quantity."""
        rows = self._of(quantity)
        curves = []
        for seed in dict.fromkeys(fact.seed for fact in rows):
            own = [fact for fact in rows if fact.seed == seed]
            k = np.array([fact.k for fact in own])
            curves.append((k, np.array([fact.value for fact in own])))
        return curves


def draw(figure: Figure, facts: Sequence[Fact]) -> None:
    """Draw the six panels onto an empty figure.

    The upper row shows the two theorems on rates and the eigenvalues of B^-1, the lower row Lemma
    2.3, the Lighthouse point and the limit of FedSSO.

    Args:
        figure: An empty figure of matplotlib. Its size is set here.
        facts: The facts of all claims.
    """
    panels = (
        (_convex, "Theorem 2.1"),
        (_rough, "Theorem 3.1"),
        (_eigen, "Theorem 2.1"),
        (_det, "Lemma 2.3"),
        (_lighthouse, "Theorem 1.1"),
        (_bias, "Limit"),
    )
    every = figure.subplots(2, 3).ravel()
    for axes in every:
        axes.grid(True)
    for axes, (panel, claim) in zip(every, panels, strict=True):
        panel(axes, Book(facts, claim))
    figure.set_size_inches(10, 7.2)


# ---- parts of a panel ----


def _title(
    axes: Axes,
    title: str,
    x: str,
    y: str,
) -> None:
    """The title of a panel and the labels of its axes."""
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)


def _logarithmic(axes: Axes) -> None:
    """Make both axes logarithmic, with powers of ten as plain text.

    The style of this package does not render formulas.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(numticks=6))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())


def _legend(axes: Axes, **where: Any) -> None:
    """A small legend on a nearly white ground.

    `where` is passed on to matplotlib, above all `loc`.
    """
    axes.legend(fontsize=7.5, frameon=True, framealpha=0.85, edgecolor="none", **where)


def _raise_top(axes: Axes, factor: float) -> None:
    """Raise the upper limit of the y axis, to make room for the legend."""
    _, top = axes.get_ylim()
    axes.set_ylim(top=top * factor)


def _style(name: str) -> Any:
    """The line style of a setting: dashes for runs with the reset of B."""
    return OVER if name == RESET else "-"


def _band(
    axes: Axes,
    curves: Sequence[Curve],
    color: str,
    label: str,
    end: float,
) -> None:
    """Draw the runs of one setting as a line with a band.

    The line is the mean of the seeds that reach round `end`, the band their range. The other seeds
    diverged: each is a thin line that stops at a cross. The legend names the setting once, even if
    every seed diverged.

    Args:
        axes: The panel.
        curves: The rounds and values of each seed.
        color: The colour of the setting.
        label: The name of the setting, for the legend.
        end: The last round of a run that did not diverge.
    """
    line: dict[str, Any] = {"color": color, "lw": 1.6, "ls": _style(label)}
    # An empty line makes the entry of the legend.
    axes.plot([], [], **line, label=label)
    whole = [(k, value) for k, value in curves if k[-1] == end]
    if whole:
        rounds = whole[0][0]
        values = np.array([value for _, value in whole])
        axes.plot(rounds, values.mean(0), **line)
        axes.fill_between(
            rounds,
            values.min(0),
            values.max(0),
            color=color,
            alpha=0.2,
            lw=0,
        )
    for k, value in curves:
        if k[-1] != end:
            axes.plot(k, value, color=color, lw=0.7)
            _cross(axes, k, value, color)


def _cross(
    axes: Axes,
    k: Array,
    value: Array,
    color: str,
) -> None:
    """A cross at the end of a run that diverged."""
    axes.plot(
        k[-1],
        value[-1],
        color=color,
        marker="x",
        ms=5,
    )


# ---- the panels ----


def _convex(axes: Axes, book: Book) -> None:
    """Theorem 2.1: the gap f(x_k) - f* of both schedules in one dimension.

    The dashed line is the corrected bound, which the gap of that schedule should not exceed.
    """
    _title(axes, "Theorem 2.1: the gap, d = 1", "round k", "f(x_k) − f*")
    _logarithmic(axes)
    k, bound = book.curves("bound, corrected schedule")[0]
    for name, color in (("corrected schedule", ORANGE), ("printed schedule", BLUE)):
        _band(
            axes,
            book.curves(f"gap, {name}"),
            color,
            name,
            k[-1],
        )
    axes.plot(k, bound, **DASHED, label="ν/(k+γ), corrected")
    _legend(axes, loc="lower left")


def _rough(axes: Axes, book: Book) -> None:
    """Theorem 3.1: the weighted sum of squared gradients in all four settings.

    The dotted line grows like ln K. A sum that is parallel to it or flatter meets the theorem's
    order up to a logarithm.
    """
    _title(axes, "Theorem 3.1: squared gradients", "rounds K", "Σ η_k ‖∇f(x_k)‖², k ≤ K")
    _logarithmic(axes)
    k, value = book.curves(f"sum of squared gradient, {LINE}")[0]
    for name, color in SETTINGS.items():
        _band(
            axes,
            book.curves(f"sum of squared gradient, {name}"),
            color,
            name,
            k[-1],
        )
    # ln K is near zero in the first rounds, where the line would fall off a logarithmic axis.
    late = k[k >= 10]
    logarithm = 2 * value.max() * np.log(late) / np.log(late[-1])
    axes.plot(late, logarithm, **DOTTED, label="proportional to ln K")
    _raise_top(axes, 100)
    _legend(axes, loc="upper left")


def _eigen(axes: Axes, book: Book) -> None:
    """Theorem 2.1: the smallest and the largest eigenvalue of B^-1 in every run.

    The dashed lines are kappa and kappa_bar, which the theorem takes for bounds.
    """
    _title(axes, "Theorem 2.1: eigenvalues of B⁻¹", "round k", "smallest and largest")
    _logarithmic(axes)
    last = book.curves("bound, corrected schedule")[0][0][-1]
    for name, color in SETTINGS.items():
        smallest = book.curves(f"smallest eigenvalue of B^-1, {name}")
        largest = book.curves(f"largest eigenvalue of B^-1, {name}")
        label: str | None = name  # of the first line alone
        for k, value in smallest + largest:
            axes.plot(
                k,
                value,
                color=color,
                lw=0.9,
                ls=_style(name),
                label=label,
            )
            label = None
            if k[-1] < last:
                _cross(axes, k, value, color)
    _raise_top(axes, 1000)
    axes.axhline(KAPPA, **DASHED, label="κ, κ̄ of the schedule")
    axes.axhline(KAPPA_BAR, **DASHED)
    _legend(axes, loc="upper left")


def _det(axes: Axes, book: Book) -> None:
    """Lemma 2.3: both formulas for the growth of log det B against the growth that was measured.

    Only pairs that the curvature rule has overridden are shown; points on the dashed line are
    right. For all other pairs the two formulas agree.
    """
    measured = "log det B_k − log det B_{k−1}, measured"
    _title(axes, "Lemma 2.3: overridden pairs", measured, "the formula")
    name = "not convex, mini-batches"
    forced = book.values(f"overridden, {name}") > 0
    x = book.values(f"log det growth, {name}")[forced]
    paper = book.values(f"paper's formula, {name}")[forced]
    exact = book.values(f"exact formula, {name}")[forced]
    axes.plot(x, paper, ".", ms=3.5, color=BLUE, label="cur/(sᵀBs), the paper's")
    axes.plot(x, exact, ".", ms=3.5, color=ORANGE, label="(yᵀs)²/(cur sᵀBs)")
    axes.axline((0, 0), slope=1, **DASHED)
    _raise_top(axes, 1.5)
    _legend(axes, loc="upper left")


def _lighthouse(axes: Axes, book: Book) -> None:
    """Theorem 1.1: the derivative of f, and the averaged gradient g of one round.

    g lies above all values of f', so there is no point at which the two are equal.
    """
    _title(axes, "Theorem 1.1: no such point", "x", "derivative")
    x = np.linspace(-40, 40, 400)
    g = float(book.values("g, two functions")[0])
    axes.plot(
        x,
        np.arctan(x) / 4,
        color=ORANGE,
        lw=1.6,
        label="f' = ¼ atan x",
    )
    axes.axhline(pi / 8, **DASHED, label="sup f' = π/8")
    axes.axhline(g, color=BLUE, lw=1.6, label="g of one round, measured")
    axes.set_ylim(-0.5, 1.1)
    _legend(axes, loc="upper left")


def _bias(axes: Axes, book: Book) -> None:
    """The limit of FedSSO: how far its model is from two points at the end, over the client step α.

    With five local steps it ends at FedAvg's fixed point, whose distance to the minimiser x* is
    proportional to α. With one local step it ends at x*.
    """
    distance = f"distance after {LIMIT_ROUNDS} rounds"
    _title(axes, "Where FedSSO ends, constant α", "client step α", distance)
    _logarithmic(axes)
    away = _distances(book, "minimiser")
    near = _distances(book, "fixed point")
    line: dict[str, Any] = {"ms": 4, "lw": 1.4}
    label = f"to x*, τ = {LIMIT_TAU}"
    axes.plot(LIMIT_ALPHAS, away, "o-", color=ORANGE, **line, label=label)
    proportional = [2 * away[-1] * alpha / LIMIT_ALPHAS[-1] for alpha in LIMIT_ALPHAS]
    axes.plot(LIMIT_ALPHAS, proportional, **DASHED, label="proportional to α")
    label = f"to FedAvg's fixed point, τ = {LIMIT_TAU}"
    axes.plot(LIMIT_ALPHAS, near, "o-", color=BLUE, **line, label=label)
    largest = LIMIT_ALPHAS[0]
    single = book.values(f"distance to the minimiser, tau = 1, alpha = {largest:g}").mean()
    axes.plot(largest, single, "s", color=GREEN, ms=5, label="to x*, τ = 1")
    axes.set_xticks(LIMIT_ALPHAS)
    _legend(axes, loc="center left")


def _distances(book: Book, point: str) -> list[float]:
    """The mean distance to a point over all seeds, for each α.

    `point` is "minimiser" or "fixed point".
    """
    setting = f"distance to the {point}, tau = {LIMIT_TAU}"
    return [book.values(f"{setting}, alpha = {alpha:g}").mean() for alpha in LIMIT_ALPHAS]
