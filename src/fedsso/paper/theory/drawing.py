"""The figure of the theory's claims, drawn from the facts that theory.csv holds."""

from __future__ import annotations

from collections.abc import Sequence
from math import pi
from typing import TYPE_CHECKING, Any

import numpy as np

from ...report.styles import FAMILIES
from .points import ALPHAS, ROUNDS, TAU
from .rates import EXACT, KAPPA, KAPPA_BAR, LINE, NOISY, RESET
from .watch import Array, Fact

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ORANGE, BLUE, GREEN, OTHER = list(FAMILIES)[:4]
SETTINGS = {LINE: ORANGE, EXACT: BLUE, NOISY: GREEN, RESET: OTHER}
OVER = (0, (4, 3))  # lets the runs without the reset show, which are the same up to its first
DASHED: dict[str, Any] = {"color": "#555555", "lw": 1.2, "ls": (0, (4, 2))}
DOTTED: dict[str, Any] = {"color": "#555555", "lw": 1.2, "ls": (0, (1.2, 1.6))}


class Book:
    """The facts of one claim, found by quantity."""

    def __init__(self, facts: Sequence[Fact], claim: str) -> None:
        self.facts = [fact for fact in facts if fact.claim == claim]

    def values(self, quantity: str) -> Array:
        """All values, in order."""
        return np.array([fact.value for fact in self.facts if fact.quantity == quantity])

    def curves(self, quantity: str) -> list[tuple[Array, Array]]:
        """(k, value) of every seed."""
        rows = [fact for fact in self.facts if fact.quantity == quantity]
        seeds = dict.fromkeys(fact.seed for fact in rows)
        each = [[(fact.k, fact.value) for fact in rows if fact.seed == seed] for seed in seeds]
        return [(np.array(part).T[0], np.array(part).T[1]) for part in each]


def draw(figure: Figure, facts: Sequence[Fact]) -> None:
    """Six panels."""
    (convex, rough, eigen), (det, lighthouse, bias) = figure.subplots(2, 3)
    for axes in (convex, rough, eigen, det, lighthouse, bias):
        axes.grid(True)
    _convex(convex, Book(facts, "Theorem 2.1"))
    _rough(rough, Book(facts, "Theorem 3.1"))
    _eigen(eigen, Book(facts, "Theorem 2.1"))
    _det(det, Book(facts, "Lemma 2.3"))
    _lighthouse(lighthouse, Book(facts, "Theorem 1.1"))
    _bias(bias, Book(facts, "Limit"))
    figure.set_size_inches(10, 7.2)


def _title(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)


def _logarithmic(axes: Axes) -> None:
    """Powers of ten as text: the look of the package does not read formulas."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(numticks=6))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())


def _legend(axes: Axes, **where: Any) -> None:
    axes.legend(fontsize=7.5, frameon=True, framealpha=0.85, edgecolor="none", **where)


def _band(
    axes: Axes, curves: Sequence[tuple[Array, Array]], color: str, label: str, end: float
) -> None:
    """The mean of the seeds that go to the end, with their range; the others thin, up to a cross."""
    line: dict[str, Any] = {"color": color, "lw": 1.6, "ls": OVER if label == RESET else "-"}
    axes.plot([], [], **line, label=label)
    whole = [(k, v) for k, v in curves if k[-1] == end]
    if whole:
        values = np.array([v for _, v in whole])
        axes.plot(whole[0][0], values.mean(0), **line)
        axes.fill_between(whole[0][0], values.min(0), values.max(0), color=color, alpha=0.2, lw=0)
    for k, v in curves:
        if k[-1] != end:
            axes.plot(k, v, color=color, lw=0.7)
            axes.plot(k[-1], v[-1], color=color, marker="x", ms=5)


def _convex(axes: Axes, book: Book) -> None:
    _title(axes, "Theorem 2.1: the gap, d = 1", "round k", "f(x_k) − f*")
    _logarithmic(axes)
    k, bound = book.curves("bound, corrected schedule")[0]
    for name, color in (("corrected schedule", ORANGE), ("printed schedule", BLUE)):
        _band(axes, book.curves(f"gap, {name}"), color, name, k[-1])
    axes.plot(k, bound, **DASHED, label="ν/(k+γ), corrected")
    _legend(axes, loc="lower left")


def _rough(axes: Axes, book: Book) -> None:
    _title(axes, "Theorem 3.1: squared gradients", "rounds K", "Σ η_k ‖∇f(x_k)‖², k ≤ K")
    _logarithmic(axes)
    k, value = book.curves(f"sum of squared gradient, {LINE}")[0]
    for name, color in SETTINGS.items():
        _band(axes, book.curves(f"sum of squared gradient, {name}"), color, name, k[-1])
    late = k[k >= 10]
    axes.plot(
        late,
        2 * value.max() * np.log(late) / np.log(late[-1]),
        **DOTTED,
        label="proportional to ln K",
    )
    axes.set_ylim(top=axes.get_ylim()[1] * 100)  # room for the legend
    _legend(axes, loc="upper left")


def _eigen(axes: Axes, book: Book) -> None:
    _title(axes, "Theorem 2.1: eigenvalues of B⁻¹", "round k", "smallest and largest")
    _logarithmic(axes)
    last = book.curves("bound, corrected schedule")[0][0][-1]
    for name, color in SETTINGS.items():
        for place, end in enumerate(("smallest", "largest")):
            for i, (k, value) in enumerate(book.curves(f"{end} eigenvalue of B^-1, {name}")):
                look: dict[str, Any] = {
                    "color": color,
                    "lw": 0.9,
                    "ls": OVER if name == RESET else "-",
                }
                axes.plot(k, value, **look, label=name if place == i == 0 else None)
                if k[-1] < last:  # it diverged
                    axes.plot(k[-1], value[-1], color=color, marker="x", ms=5)
    axes.set_ylim(top=axes.get_ylim()[1] * 1000)  # room for the legend
    for bound in (KAPPA, KAPPA_BAR):
        axes.axhline(bound, **DASHED, label="κ, κ̄ of the schedule" if bound == KAPPA else None)
    _legend(axes, loc="upper left")


def _det(axes: Axes, book: Book) -> None:
    _title(
        axes,
        "Lemma 2.3: overridden pairs",
        "log det B_k − log det B_{k−1}, measured",
        "the formula",
    )
    name = "not convex, mini-batches"
    forced = book.values(f"overridden, {name}") > 0
    x = book.values(f"log det growth, {name}")[forced]
    for label, quantity, color in (
        ("cur/(sᵀBs), the paper's", "paper's", BLUE),
        ("(yᵀs)²/(cur sᵀBs)", "exact", ORANGE),
    ):
        axes.plot(
            x,
            book.values(f"{quantity} formula, {name}")[forced],
            ".",
            ms=3.5,
            color=color,
            label=label,
        )
    axes.axline((0, 0), slope=1, **DASHED)
    axes.set_ylim(top=axes.get_ylim()[1] * 1.5)  # room for the legend
    _legend(axes, loc="upper left")


def _lighthouse(axes: Axes, book: Book) -> None:
    _title(axes, "Theorem 1.1: no such point", "x", "derivative")
    x = np.linspace(-40, 40, 400)
    axes.plot(x, np.arctan(x) / 4, color=ORANGE, lw=1.6, label="f' = ¼ atan x")
    axes.axhline(pi / 8, **DASHED, label="sup f' = π/8")
    axes.axhline(
        float(book.values("g, two functions")[0]),
        color=BLUE,
        lw=1.6,
        label="g of one round, measured",
    )
    axes.set_ylim(-0.5, 1.1)
    _legend(axes, loc="upper left")


def _bias(axes: Axes, book: Book) -> None:
    _title(
        axes, "Where FedSSO ends, constant α", "client step α", f"distance after {ROUNDS} rounds"
    )
    _logarithmic(axes)
    for point, color in (("minimiser", ORANGE), ("fixed point", BLUE)):
        mean = [
            book.values(f"distance to the {point}, tau = {TAU}, alpha = {a:g}").mean()
            for a in ALPHAS
        ]
        name = "x*" if point == "minimiser" else "FedAvg's fixed point"
        axes.plot(ALPHAS, mean, "o-", color=color, ms=4, lw=1.4, label=f"to {name}, τ = {TAU}")
        if point == "minimiser":
            axes.plot(
                ALPHAS,
                [2 * mean[-1] * a / ALPHAS[-1] for a in ALPHAS],
                **DASHED,
                label="proportional to α",
            )
    single = book.values(f"distance to the minimiser, tau = 1, alpha = {ALPHAS[0]:g}").mean()
    axes.plot(ALPHAS[0], single, "s", color=GREEN, ms=5, label="to x*, τ = 1")
    axes.set_xticks(ALPHAS)
    _legend(axes, loc="center left")
