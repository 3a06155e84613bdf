"""The two pictures of idea.md: a round of FedSSO as a drawing, and FedAvg and FedSSO on the
embedded digits, computed.

python docs/pictures.py
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

import fedsso
from fedsso import report
from fedsso.support import picture

ALPHAS = (0.1, 0.3, 1.0, 3.0, 10.0)  # of FedAvg
ROUNDS, SEEDS = 60, (0, 1, 2)
CLIENT, SERVER, INK = "#e8f1fa", "#fdf1e0", "#1f2d3d"


def box(
    axes: Axes, x: float, y: float, text: str, colour: str, width: float = 2.1, height: float = 0.95
) -> None:
    """A rounded box around its text."""
    style = "round,pad=0.04,rounding_size=0.12"
    corner = (x - width / 2, y - height / 2)
    axes.add_patch(
        FancyBboxPatch(
            corner, width, height, boxstyle=style, facecolor=colour, edgecolor=INK, linewidth=1
        )
    )
    axes.text(x, y, text, ha="center", va="center", fontsize=9.5, color=INK, linespacing=1.45)


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], bend: float = 0.0
) -> None:
    """From one box to the next."""
    style = {
        "arrowstyle": "-|>",
        "color": INK,
        "linewidth": 1.1,
        "connectionstyle": f"arc3,rad={bend}",
    }
    axes.annotate("", end, start, arrowprops=style)


def draw_round(figure: Figure) -> None:
    """Clients on the left, the server's four steps to the right, the new model back below."""
    figure.set_size_inches(10, 4.2)
    axes = figure.add_subplot()
    axes.set(xlim=(-0.1, 14.1), ylim=(-1.45, 4.5))
    axes.axis("off")
    for y, name in ((3.2, "client 1"), (1.9, "client 2"), (0.6, "client N")):
        box(axes, 1.3, y, f"{name}\nτ steps of SGD, size α", CLIENT, width=2.5)
        arrow(axes, (2.62, y), (3.55, 1.9 + 0.25 * (y - 1.9)))
    steps = (
        "mean of the models\nv = Σ pᵢ xᵢ",
        "mean gradient\ng = (x − v) / (α τ)",
        "BFGS: B learns\nfrom the changes\ns of x and y of g",
        "quasi-Newton step\nx ← x − η B⁻¹ g",
    )
    for i, text in enumerate(steps):
        box(axes, 4.65 + 2.7 * i, 1.9, text, SERVER, height=1.35 if i == 2 else 1.0)
        if i:
            arrow(axes, (4.65 + 2.7 * (i - 1) + 1.1, 1.9), (4.65 + 2.7 * i - 1.1, 1.9))
    axes.plot([12.75, 12.75, 1.3], [1.36, -0.75, -0.75], color=INK, linewidth=1.1)
    arrow(axes, (1.3, -0.76), (1.3, 0.08))
    axes.text(
        7.0, -0.95, "the new model x goes to the clients", ha="center", va="top", fontsize=9.5
    )
    axes.text(
        1.3,
        4.1,
        "clients: FedAvg's, unchanged",
        ha="center",
        fontsize=10.5,
        fontweight="bold",
        color=INK,
    )
    axes.text(
        8.7,
        4.1,
        "server: all of FedSSO is here",
        ha="center",
        fontsize=10.5,
        fontweight="bold",
        color=INK,
    )


def curves() -> list[report.Curve]:
    """FedSSO as it comes and FedAvg with its best of five client steps; 20 clients with very unlike
    labels."""
    fed = fedsso.load("digits", clients=20, partition="dirichlet", concentration=0.1, seed=0)
    grid = [fedsso.FedSSO(), *(fedsso.FedAvg(alpha=a) for a in ALPHAS)]
    runs = fedsso.compare(
        fed, "mclr", grid, rounds=ROUNDS, local_steps=5, batch_size=50, seeds=SEEDS, device="cpu"
    )
    best = runs.winners(target=0.95)
    return [
        best["fedsso"].curve("FedSSO, nothing tuned"),
        best["fedavg"].curve("FedAvg, the best of five α"),
    ]


def main(folder: Path) -> None:
    """Write both pictures."""
    picture.draw(folder / "idea.png", draw_round)
    report.plot(
        curves(),
        folder / "idea-curves.png",
        title="handwritten digits, 20 clients",
        targets=(0.9, 0.95),
    )


if __name__ == "__main__":
    main(Path(__file__).parent)
