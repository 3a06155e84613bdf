"""Two pictures of the robustness bench: how far FedSSO is ahead of the best rival, and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedsso.paper.tasks import TASKS
from fedsso.report import plots
from fedsso.report.styles import SMALL, Style, shade, style
from fedsso.support import picture

from .robustness_score import ACCURACY, thin

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Score = Mapping[str, Any]
OURS = "auto"  # every other method is a rival
NAMES = {
    "auto": "FedSSO",
    "published": "FedSSO as published",
    "fedavg": "FedAvg",
    "fedavgm": "FedAvgM",
    "fedadam": "FedAdam",
    "fedyogi": "FedYogi",
    "scaffold": "SCAFFOLD",
    "fedexp": "FedExP",
    "fedacg": "FedACG",
    "diloco": "outer Nesterov",
    "serverlion": "server Lion",
    "servermuon": "server Muon",
    "fedvarp": "FedVARP",
    "mifa": "MIFA",
}
CHANGES = {  # what the first picture shows, with marker and shade
    "base": ("all clients", "o", 0.0),
    "50% of the clients": ("50 %", "s", 0.25),
    "25% of the clients": ("25 %", "D", 0.45),
    "10% of the clients": ("10 %", "v", 0.62),
    "30% drop out": ("30 % drop out", "X", 0.0),
}
TITLES = {name: task.title for name, task in TASKS.items()} | {
    "digits": "Digits, 20 clients, MCLR",
    "mnist-mlp": "MNIST, 20 clients, MLP",
    "heart-mclr": "Heart disease, 4 hospitals, MCLR",
    "emnist-mlp": "EMNIST digits, 20 clients, MLP",
    "a9a-mclr": "a9a, 20 clients, MCLR",
    "phishing-mclr": "Phishing, 20 clients, MCLR",
    "tweets-mclr": "Sentiment140, 20 clients, MCLR",
    "cifar-resnet20": "CIFAR-10, 10 clients, ResNet-20",
    "cells-mclr": "Cells, 10 clients, MCLR",
    "churn-mclr": "Churn, 20 clients, MCLR",
    "lending-mclr": "Lending, 50 states, MCLR",
    "leaves-mclr": "Leaves, 20 clients, MCLR",
    "jobs-mclr": "Jobs, 14 protocols, MCLR",
    "developers-mclr": "Developers, 5 countries, MCLR",
    "diamonds-mclr": "Diamonds, 20 clients, MCLR",
    "attrition-mclr": "Attrition, 9 roles, MCLR",
    "credit-mclr": "Credit, 20 clients, MCLR",
    "calls-mclr": "Calls, 51 states, MCLR",
    "caravan-mclr": "Caravan, 20 clients, MCLR",
    "cells-mlp": "Cells, 10 clients, MLP",
    "jobs-mlp": "Jobs, 14 protocols, MLP",
    "credit-mlp": "Credit, 20 clients, MLP",
    "spam-mclr": "Spam, 20 clients, MCLR",
    "taxi-mclr": "Taxi, 7 companies, MCLR",
    "values-mclr": "Values, 4 countries, MCLR",
    "crashes-mclr": "Crashes, 20 clients, MCLR",
    "insurance-mclr": "Insurance, 20 clients, MCLR",
    "cars-mclr": "Cars, 20 clients, MCLR",
    "speech-mclr": "Speech, 10 clients, MCLR",
    "taxi-mlp": "Taxi, 7 companies, MLP",
    "crashes-mlp": "Crashes, 20 clients, MLP",
    "cars-mlp": "Cars, 20 clients, MLP",
    "chile-mclr": "Chile, 5 regions, MCLR",
    "families-mclr": "Families, 58 districts, MCLR",
    "names-mclr": "Names, 20 clients, MCLR",
    "juice-mclr": "Juice, 5 stores, MCLR",
    "health-mclr": "Health, 4 regions, MCLR",
    "health-mlp": "Health, 4 regions, MLP",
    "names-mlp": "Names, 20 clients, MLP",
}
WIDTH = 11  # inches
FURTHEST = 4.0  # per cent: what is further ahead or behind is drawn at the edge
FASTEST = 2.0  # times as fast: likewise


def look(method: str) -> Style:
    """The colour and dashes of its algorithm; FedSSO as published is darker than ours."""
    base = style("fedsso" if method in (OURS, "published") else method)
    return base._replace(color=shade(base.color, -0.45)) if method == "published" else base


def _panels(figure: Figure, across: int, tasks: Sequence[str]) -> tuple[int, list[Axes]]:
    """How many rows of panels there are, and a titled panel for each task."""
    down = -(-len(tasks) // across)
    grid = list(figure.subplots(down, across, squeeze=False).flat)
    for axes, task in zip(grid, tasks, strict=False):
        axes.set_title(TITLES.get(task, task), loc="left", fontsize=10, fontweight="bold")
    for axes in grid[len(tasks) :]:
        axes.set_axis_off()
    return down, grid[: len(tasks)]


# ---- how far ahead ----


def summary(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A line for each task: the end and the rounds of FedSSO beside the best tuned rival's."""
    picture.draw(path, lambda figure: _summary(figure, rows))


def _summary(figure: Figure, rows: Sequence[Mapping[str, Any]]) -> None:
    shown = [row for row in rows if row["change"] in CHANGES]
    halves = {row["task"]: row["half"] for row in shown}
    tasks = sorted(halves, key=lambda task: halves[task])  # "finding" before "judging"
    ends, rounds = figure.subplots(1, 2, sharey=True)
    lines = {task: place for place, task in enumerate(tasks)}
    for axes in (ends, rounds):
        axes.grid(True, axis="x")
        axes.set_ylim(len(tasks) - 0.4, -0.6)
        axes.set_yticks(range(len(tasks)), [TITLES.get(task, task) for task in tasks])
        axes.tick_params(axis="y", length=0)
        found = sum(half == "finding" for half in halves.values())
        axes.axhline(found - 0.5, color="#999999", lw=0.9)
    _spread(ends, shown, lines)
    _ratios(rounds, shown, lines)
    plots.heading(
        figure,
        "FedSSO with no setting, beside the best of all rivals tuned in each cell; right is better",
    )
    height = plots.legend(figure, _markers(), WIDTH)
    figure.set_size_inches(WIDTH, 1.2 + 0.42 * len(tasks) + 0.22 * height)


def _markers() -> list[Any]:
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], label=label, marker=marker, color=_tone(light), ls="none", ms=6)
        for label, marker, light in CHANGES.values()
    ]


def _tone(light: float) -> str:
    return shade(look(OURS).color, light)


def _spread(
    axes: Axes,
    rows: Sequence[Mapping[str, Any]],
    lines: Mapping[str, int],
) -> None:
    axes.set_title("At the end, % ahead of the best rival", loc="left", fontsize=10)
    axes.axvline(0, color="#333333", lw=1.1)
    for row in rows:
        ahead = row["ahead"]
        within = min(max(-FURTHEST, ahead), FURTHEST)
        _dot(axes, row, lines, within, beyond=within != ahead)
    axes.set_xlim(-FURTHEST - 0.2, FURTHEST + 0.2)


def _ratios(
    axes: Axes,
    rows: Sequence[Mapping[str, Any]],
    lines: Mapping[str, int],
) -> None:
    axes.set_title("Rounds to the target: best rival / FedSSO", loc="left", fontsize=10)
    axes.axvline(1, color="#333333", lw=1.1)
    for row in rows:
        if row["ratio"] is None:
            continue
        value = 1 / row["ratio"]
        _dot(axes, row, lines, min(FASTEST, value), beyond=value > FASTEST)
    axes.set_xlim(0, FASTEST + 0.1)


def _dot(
    axes: Axes,
    row: Mapping[str, Any],
    lines: Mapping[str, int],
    value: float,
    *,
    beyond: bool,
) -> None:
    """A marker on the line of its task; hollow at the edge if it lies beyond."""
    _, marker, light = CHANGES[row["change"]]
    lane = 0.13 * (list(CHANGES).index(row["change"]) - 2)
    inside = "white" if beyond else _tone(light)
    axes.plot(value, lines[row["task"]] + lane, marker=marker, color=_tone(light), mfc=inside, ms=6)


# ---- how it gets there ----

CURVES_OF = (
    "mnist-mclr",
    "mnist-mlp",
    "fashion-cnn",
    "cifar-lenet",
    "emnist-mlp",
    "phishing-mclr",
)
"""Tasks whose curves are kept and shown."""
DRAWN = ("auto", "fedavg", "fedadam", "scaffold", "fedacg", "servermuon")


def curves(path: Path, found: Sequence[Score]) -> None:
    """The metric over the rounds: FedSSO, and some rivals' best settings."""
    picture.draw(path, lambda figure: _curves(figure, found))


def _curves(figure: Figure, found: Sequence[Score]) -> None:
    down, panels = _panels(figure, 3, [one["task"] for one in found])
    for axes, one in zip(panels, found, strict=True):
        _course(axes, one)
    plots.heading(
        figure,
        "25 % of the clients in each round: "
        "FedSSO with no setting, rivals with the best of their grids",
    )
    keys = plots.keys([NAMES[name] for name in DRAWN], [look(name) for name in DRAWN])
    rows = plots.legend(figure, keys, WIDTH)
    figure.set_size_inches(WIDTH, 0.6 + 2.7 * down + 0.22 * rows)


def _course(axes: Axes, one: Score) -> None:
    methods = one["methods"]
    lines = {
        name: np.array(methods[name]["curve"], float)
        for name in DRAWN
        if "curve" in methods.get(name, {})
    }
    rounds = one["rounds"]
    at = np.array(thin(np.arange(rounds + 1.0)), float)
    axes.grid(True)
    plots.round_axis(axes)
    plots.accuracy_axis(axes, [one["target"]])  # a loss then has its own scale
    accuracy, drawn = one["metric"] == ACCURACY, list(lines.values())
    if accuracy:
        axes.set_ylim(*_heights([lines[OURS]], drawn, one["target"]))
    else:
        plots.loss_axis(axes, *_depths(drawn, one["target"]))
    for name, values in lines.items():
        weight: dict[str, Any] = (
            {"lw": 2.2, "zorder": 4} if name == OURS else {"lw": 1.4, "zorder": 3}
        )
        axes.plot(at, values, **weight, **look(name)._asdict())
    _outside(axes, {name: values[-1] for name, values in lines.items()}, up=not accuracy)


def _heights(
    ours: Sequence[NDArray[Any]], drawn: Sequence[NDArray[Any]], target: float
) -> tuple[float, float]:
    """From the least accuracy of FedSSO after a tenth of the rounds to the largest of all.

    The target is among them.
    """
    late = len(ours[0]) // 10
    bottom = float(min(target, *(own[late:].min() for own in ours)))
    top = float(max(target, *(own.max() for own in drawn)))
    margin = 0.06 * ((top - bottom) or 1.0)
    return bottom - margin, top + margin


def _depths(drawn: Sequence[NDArray[Any]], target: float) -> tuple[float, float]:
    """Losses up to a little more than at the start, and the target."""
    bottom, top = float(np.nanmin(drawn)), min(float(np.nanmax(drawn)), 1.5 * float(drawn[0][0]))
    return min(bottom, target) / 1.05, 1.05 * max(top, target)


def _outside(axes: Axes, ends: Mapping[str, float], *, up: bool) -> None:
    """Names the curves that end outside the panel, in the corner where they left."""
    bottom, top = axes.get_ylim()
    lost = {name: end for name, end in ends.items() if not bottom <= end <= top}
    for place, (name, end) in enumerate(lost.items()):
        how = f"ends at {end:.2f}" if end > 0 else "diverges"
        y = 0.04 + 0.08 * place
        axes.text(
            0.98,
            1 - y if up else y,
            f"{NAMES.get(name, name)} {how}",
            transform=axes.transAxes,
            ha="right",
            va="top" if up else "bottom",
            fontsize=SMALL,
            color=look(name).color,
        )
