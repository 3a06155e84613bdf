"""Two pictures of the robustness bench: where every method ends, and how it gets there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedsso.paper.tasks import TASKS
from fedsso.report import plots
from fedsso.report.styles import GREY, SMALL, Style, shade, style
from fedsso.support import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Score = Mapping[str, Any]
ACCURACY = "test_accuracy"
OURS = ("auto", "default")  # every other method is a rival
FEDSSO = (*OURS, "published")
NAMES = {
    "auto": "FedSSO",
    "default": "FedSSO, five α",
    "published": "FedSSO as published",
    "fedavg": "FedAvg",
    "fedadam": "FedAdam",
    "fedyogi": "FedYogi",
    "scaffold": "SCAFFOLD",
}
PARTICIPATION = {"base": "all clients", "50% of the clients": "50 %", "25% of the clients": "25 %"}
TITLES = {name: task.title for name, task in TASKS.items()} | {
    "digits": "Digits, 20 clients, MCLR",
    "mnist-mlp": "MNIST, 20 clients, MLP",
    "heart-mclr": "Heart disease, 4 hospitals, MCLR",
}
WIDTH = 11  # inches


def look(method: str) -> Style:
    """The colour and dashes of its algorithm; FedSSO as published is darker than ours."""
    base = style("fedsso" if method in FEDSSO else method)
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


# ---- where every method ends ----

LANE = 0.125  # between two methods, in rows
FAR = 4  # times as far behind the best as the median: beyond the edge


def finals(path: Path, found: Sequence[Score]) -> None:
    """Final values, a panel for each task and a row for each participation; right is better in all
    of them."""
    picture.draw(path, lambda figure: _finals(figure, found))


def _finals(figure: Figure, found: Sequence[Score]) -> None:
    tasks = list(dict.fromkeys(one["task"] for one in found))
    down, panels = _panels(figure, 2, tasks)
    for axes, task in zip(panels, tasks, strict=True):
        _task(axes, {one["change"]: one for one in found if one["task"] == task})
    title = (
        "Final values: one setting of FedSSO, "
        "of each rival the best of its grid in every row; right is better"
    )
    plots.heading(figure, title)
    rows = plots.legend(figure, _keys(list(found[0]["methods"])), WIDTH)
    figure.set_size_inches(WIDTH, 0.6 + 2.75 * down + 0.22 * rows)


def _keys(methods: Sequence[str]) -> list[Any]:
    from matplotlib.lines import Line2D

    beyond = Line2D([], [], color=GREY, marker="<", ls="none", ms=5.5, label="further left")
    return [
        *(Line2D([], [], label=NAMES.get(name, name), **_marker(name)) for name in methods),
        beyond,
    ]


def _marker(name: str) -> dict[str, Any]:
    """A dot, hollow where the algorithm's line is dashed; a dumbbell for a range."""
    color, dashes = look(name)
    if name == "default":
        return {"color": shade(color, 0.45), "lw": 2.5, "marker": "o", "ms": 5}
    inside = color if dashes == "-" else "white"
    return {
        "color": color,
        "marker": "o",
        "ls": "none",
        "ms": 7 if name == "auto" else 5.5,
        "mfc": inside,
        "mew": 1.2,
    }


def _task(axes: Axes, cells: Mapping[str, Score]) -> None:
    accuracy = next(iter(cells.values()))["metric"] == ACCURACY
    axes.grid(True, axis="x")
    axes.locator_params(axis="x", nbins=6, steps=[1, 2, 5, 10])
    axes.set_xlabel("test accuracy" if accuracy else "training loss, axis reversed")
    axes.set_yticks(range(len(PARTICIPATION)), list(PARTICIPATION.values()))
    axes.tick_params(axis="y", length=0, labelcolor="#222222")
    axes.set_ylim(len(PARTICIPATION) - 0.5, -0.5)
    axes.set_xlim(*_limits(list(cells.values()), 1 if accuracy else -1))
    for place, change in enumerate(PARTICIPATION):
        if place:
            axes.axhline(place - 0.5, color="#E4E4E4", lw=0.8)
        if change in cells:
            _dots(axes, place, cells[change]["methods"])


def _limits(cells: Sequence[Score], sign: int) -> tuple[float, float]:
    """From worse to better, wide enough for FedSSO; what lies far behind the others does not decide
    the scale."""
    drawn = [
        (name, sign * v)
        for one in cells
        for name, own in one["methods"].items()
        for v in _drawn(own["final"])
    ]
    every = [value for _, value in drawn]
    best, far = max(every), FAR * (max(every) - float(np.median(every)))
    worst = min(value for name, value in drawn if name in OURS or value >= best - far)
    margin = 0.05 * ((best - worst) or 1.0)
    room = 2.5 * margin if min(every) < worst else margin  # for the arrows
    return sign * (worst - room), sign * (best + margin)


def _drawn(final: Mapping[str, Any]) -> list[float]:
    """A method's mean, and the ends of its range."""
    return [v for key, v in final.items() if key in ("mean", "best", "worst") and v is not None]


def _dots(axes: Axes, place: float, methods: Mapping[str, Any]) -> None:
    """The methods of a cell, each on its lane; a thin line marks FedSSO's value for all."""
    ours = methods["auto"]["final"]["mean"]
    axes.plot(
        [ours, ours], [place - 0.46, place + 0.46], color=look("auto").color, lw=0.9, ls=(0, (1, 2))
    )
    lanes = place + LANE * (np.arange(len(methods)) - (len(methods) - 1) / 2)
    beyond = 0
    for y, (name, own) in zip(lanes, methods.items(), strict=True):
        final = own["final"]
        if name == "default":
            worst = axes.get_xlim()[0] if final["worst"] is None else final["worst"]
            axes.plot([worst, final["best"]], [y, y], **_marker(name))
            axes.plot(final["mean"], y, color=look(name).color, marker="|", ms=8, mew=1.8)
        elif _within(axes, final["mean"]):
            axes.plot(final["mean"], y, **_marker(name))
        else:
            _arrow(axes, y, name, final["mean"], beyond)
            beyond += 1


def _within(axes: Axes, value: float | None) -> bool:
    left, right = axes.get_xlim()
    return value is not None and (value - left) * (right - left) >= 0


def _arrow(axes: Axes, y: float, name: str, value: float | None, before: int) -> None:
    """At the edge, with the number; numbers of one row stand beside each other."""
    where = axes.get_yaxis_transform()
    axes.plot(0.014, y, transform=where, **{**_marker(name), "marker": "<"})
    text = f"{value:.3f}" if value else "diverged"
    axes.text(
        0.032 + 0.085 * before,
        y,
        text,
        transform=where,
        va="center",
        fontsize=SMALL - 1,
        color="#777777",
    )


# ---- how it gets there ----

CURVES_OF = (
    "mnist-mclr",
    "mnist-mlp",
    "fashion-cnn",
    "cifar-lenet",
    "ijcnn1-mclr",
    "shakespeare-mclr",
)
"""Tasks whose curves are shown; others take the places of those that are missing."""


def curves(path: Path, found: Sequence[Score]) -> None:
    """The metric over the rounds on six tasks: FedSSO, its range over client steps, and the rivals'
    best settings."""
    shown = sorted(found, key=lambda one: one["task"] not in CURVES_OF)[:6]
    picture.draw(path, lambda figure: _curves(figure, shown))


def _curves(figure: Figure, found: Sequence[Score]) -> None:
    down, panels = _panels(figure, 3, [one["task"] for one in found])
    for axes, one in zip(panels, found, strict=True):
        _course(axes, one)
    plots.heading(
        figure,
        "25 % of the clients in each round: "
        "FedSSO with one setting, rivals with the best of their grids",
    )
    lines = [name for name in found[0]["methods"] if name != "default"]
    keys = plots.keys([NAMES.get(name, name) for name in lines], [look(name) for name in lines])
    rows = plots.legend(figure, [*keys, _band_key()], WIDTH)
    figure.set_size_inches(WIDTH, 0.6 + 2.7 * down + 0.22 * rows)


def _band_key() -> Any:
    from matplotlib.patches import Patch

    return Patch(color=look("default").color, alpha=0.25, lw=0, label="FedSSO, range over five α")


def _course(axes: Axes, one: Score) -> None:
    lines = {name: np.array(own, float) for name, own in one["curves"].items()}
    at, low, high = (lines.pop(name) for name in ("round", "low", "high"))
    axes.grid(True)
    plots.round_axis(axes)
    plots.accuracy_axis(axes, [one["target"]])  # a loss then has its own scale
    accuracy, drawn = one["metric"] == ACCURACY, [low, high, *lines.values()]
    if accuracy:
        axes.set_ylim(*_heights([low, lines["auto"]], drawn, one["target"]))
    else:
        plots.loss_axis(axes, *_depths(drawn, one["target"]))
    axes.fill_between(at, low, high, color=look("default").color, alpha=0.25, lw=0)
    for name, values in lines.items():
        weight: dict[str, Any] = (
            {"lw": 2.2, "zorder": 4} if name == "auto" else {"lw": 1.4, "zorder": 3}
        )
        axes.plot(at, values, **weight, **look(name)._asdict())
    _outside(axes, {name: values[-1] for name, values in lines.items()}, up=not accuracy)


def _heights(
    ours: Sequence[NDArray[Any]], drawn: Sequence[NDArray[Any]], target: float
) -> tuple[float, float]:
    """From the least accuracy of FedSSO after a tenth of the rounds to the target and the largest
    of all."""
    late = len(ours[0]) // 10
    bottom, top = (
        float(min(own[late:].min() for own in ours)),
        float(max(target, *(own.max() for own in drawn))),
    )
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
