"""Figures of several panels: curves beside published ones, grids of settings as heat maps, rounds
as bars."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, integer
from ..support import picture
from . import tables as report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, LogNorm
    from matplotlib.figure import Figure

SMALL = 8  # points
GREY = "#666666"
NEVER = "#E2E2E2"

# ---- curves ----


class Dots(NamedTuple):
    """A published curve of test accuracy."""

    label: str
    algorithm: str
    rounds: Sequence[int]
    accuracy: Sequence[float]


class Panel(NamedTuple):
    """One column of a figure; a curve's label is a name, then its settings, as in "FedSSO α=0.001
    η=1"."""

    title: str
    curves: Sequence[report.Curve]
    dots: Sequence[Dots] = ()


DOT: dict[str, Any] = {
    "marker": "o",
    "markersize": 3.6,
    "markeredgecolor": "white",
    "markeredgewidth": 0.4,
    "ls": "none",
}
SETTINGS = re.compile(r"[\s,(]+(\w+ ?=.*?)\)?$")


def panels(path: str | Path, columns: Sequence[Panel], *, title: str = "") -> None:
    """Training loss above test accuracy, a column for each panel, one legend for all.

    Where a name has different settings from panel to panel the legend shows the name, and the
    settings stand below their column.
    """
    if not columns:
        raise InputError("there is no panel to draw; give at least one")
    for panel in columns:
        _check_panel(panel)
    picture.draw(path, lambda figure: _panels(figure, columns, title))


def _check_panel(panel: Panel) -> None:
    if not (panel.curves or panel.dots):
        raise InputError(f"panel {panel.title!r} is empty; give it a curve, or dots")
    for curve in panel.curves:
        report.check(curve)
    for dots in panel.dots:
        if len(dots.rounds) != len(dots.accuracy):
            lengths = f"{len(dots.rounds)} rounds and {len(dots.accuracy)} accuracies"
            raise InputError(
                f"dots {dots.label!r} have {lengths}; give one accuracy for each round"
            )


class _Line(NamedTuple):
    """A curve, its label divided, and how it is drawn in every panel."""

    curve: report.Curve
    name: str
    settings: str
    look: report.Style


def _panels(figure: Figure, columns: Sequence[Panel], title: str) -> None:
    width, drawn = 3.9 + 1.9 * len(columns), _lines(columns)
    pairs = figure.subplots(2, len(columns), sharex="col", squeeze=False).T
    for (loss, accuracy), panel, lines in zip(pairs, columns, drawn, strict=True):
        _column(loss, accuracy, panel, lines)
        loss.set_title(fill(panel.title, int(width / len(columns) / 0.1)))
    for axes in pairs[1:].flat:
        axes.set_ylabel("")
    below = max(
        _settings(axes, lines, width / len(columns) - 0.25)
        for axes, lines in zip(pairs[:, 1], drawn, strict=True)
    )
    report.heading(figure, fill(title, int(width / 0.11)))
    rows = report.legend(figure, _handles(columns, drawn), width)
    figure.set_size_inches(width, 5.2 + 0.35 * bool(title) + 0.22 * rows + 0.17 * below)


def _lines(columns: Sequence[Panel]) -> list[list[_Line]]:
    """The curves of each panel; those of one name and algorithm look alike in all of them."""
    names = _names(columns)
    first: dict[tuple[str, str], report.Curve] = {}
    for curve in (c for panel in columns for c in panel.curves):
        first.setdefault((names[curve.label][0], curve.algorithm), curve)
    looks = dict(zip(first, report.styles(list(first.values())), strict=True))
    return [
        [_Line(c, *names[c.label], looks[names[c.label][0], c.algorithm]) for c in p.curves]
        for p in columns
    ]


def _names(columns: Sequence[Panel]) -> dict[str, tuple[str, str]]:
    """Name and settings of each label; the whole label is the name unless only panels tell its
    settings apart."""
    divided = {curve.label: _divided(curve.label) for panel in columns for curve in panel.curves}
    names = [[divided[curve.label][0] for curve in panel.curves] for panel in columns]
    twice = any(len(set(own)) < len(own) for own in names)
    if twice or len({name for own in names for name in own}) == len(divided):
        return {label: (label, "") for label in divided}
    return divided


def _divided(label: str) -> tuple[str, str]:
    found = SETTINGS.search(label)
    return (label[: found.start()], found[1]) if found else (label, "")


def _column(loss: Axes, accuracy: Axes, panel: Panel, lines: Sequence[_Line]) -> None:
    for axes in (loss, accuracy):
        axes.grid(True)
        report.round_axis(axes)
    report.loss_axis(loss, *report.loss_range(panel.curves))
    report.accuracy_axis(accuracy)
    _cut_dips(accuracy, panel.curves)  # first: a cross stays within the axes
    for line in lines:
        report.lines(loss, line.curve, line.look, "train_loss")
        report.lines(accuracy, line.curve, line.look, "test_accuracy")
    for dots in panel.dots:
        accuracy.plot(
            dots.rounds, dots.accuracy, color=report.style(dots.algorithm).color, zorder=4, **DOT
        )
    loss.set_xlabel("")


def _cut_dips(axes: Axes, curves: Sequence[report.Curve]) -> None:
    """Where curves start high, short dips of a few rounds do not decide the scale."""
    calm = [
        report.series([t for t in c.traces if t.diverged is None], "test_accuracy")[1]
        for c in curves
    ]
    every = [report.series(c.traces, "test_accuracy")[1] for c in curves]
    if not any(values.size for values in calm):
        return
    bottom = min(float(np.nanmin(values)) for values in every if values.size)
    top = max(float(np.nanmax(values)) for values in every if values.size)
    low = min(
        min(float(np.nanmean(v[:, 0])), float(np.nanquantile(v, 0.1))) for v in calm if v.size
    )
    if low - bottom > 0.3 * (top - bottom):
        axes.set_ylim(low - 0.15 * (top - low), top + 0.1 * (top - low))


def _settings(axes: Axes, lines: Sequence[_Line], width: float) -> int:
    """The settings of a panel's curves below it, where the legend does not tell them; returns how
    many rows."""
    from matplotlib.transforms import ScaledTranslation

    told = [line for line in lines if line.settings]
    if not told:
        return 0
    rows, columns = report.legend_shape([0.42 + 0.067 * len(line.settings) for line in told], width)
    axes.legend(
        handles=report.keys([line.settings for line in told], [line.look for line in told]),
        loc="upper left",
        bbox_to_anchor=(0, 0),
        bbox_transform=axes.transAxes + ScaledTranslation(-0.45, -0.5, axes.figure.dpi_scale_trans),
        ncols=columns,
        fontsize=SMALL,
        frameon=False,
        borderaxespad=0,
        handlelength=2,
        columnspacing=1,
    )
    return rows


def _handles(columns: Sequence[Panel], drawn: Sequence[Sequence[_Line]]) -> list[Any]:
    """One entry for each name, for what bands and crosses mean, and for each kind of dots."""
    from matplotlib.lines import Line2D

    looks = {(line.name, line.curve.algorithm): line.look for lines in drawn for line in lines}
    colors: dict[str, set[str]] = {}
    for dots in (dots for panel in columns for dots in panel.dots):
        colors.setdefault(dots.label, set()).add(report.style(dots.algorithm).color)
    return [
        *report.keys([name for name, _ in looks], list(looks.values())),
        *report.marks([line.curve for lines in drawn for line in lines]),
        *(
            Line2D([], [], color=min(c) if len(c) == 1 else GREY, label=label, **DOT)
            for label, c in colors.items()
        ),
    ]


# ---- grids of settings ----


class Heat(NamedTuple):
    """Rounds to a target over the settings of one algorithm: NaN where it is not reached, `lost`
    where runs diverge."""

    title: str
    down: str
    across: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: NDArray[Any]
    lost: NDArray[Any]


class _Place(NamedTuple):
    """Where a map's cells lie, in inches from the upper left corner of the figure."""

    left: float
    top: float
    width: float
    height: float


class _Scale(NamedTuple):
    """How rounds become colours."""

    norm: LogNorm
    colours: Colormap


STAR: dict[str, Any] = {
    "marker": "*",
    "markersize": 11,
    "markeredgecolor": "white",
    "color": "#D55E00",
    "ls": "none",
}
FULL = 12.0  # inches that a row of maps may take
CELL = (0.42, 0.3)
LEGIBLE = 0.3  # the narrowest cell that holds a number


def heat_maps(path: str | Path, maps: Sequence[Heat], *, title: str, most: int) -> None:
    """A map of each algorithm's grid: the darker, the fewer of `most` rounds are needed."""
    if not maps:
        raise InputError("there is no map to draw; give at least one")
    integer("most", most, 1)
    for heat in maps:
        _check_heat(heat, most)
    picture.draw(path, lambda figure: _heat_maps(figure, maps, title, most))


def _check_heat(heat: Heat, most: int) -> None:
    wanted = (len(heat.rows), len(heat.columns))
    if 0 in wanted:
        raise InputError(
            f"map {heat.title!r} has {wanted[0]} rows and {wanted[1]} columns; give at least one "
            f"of each"
        )
    for name, cells in (("values", heat.values), ("lost", heat.lost)):
        if cells.shape != wanted:
            raise InputError(
                f"map {heat.title!r} needs {name} of shape {wanted}, got {cells.shape}"
            )
    if not np.all(np.isnan(heat.values) | (heat.values >= 0) & (heat.values <= most)):
        raise InputError(f"map {heat.title!r} needs rounds from 0 to most={most}, or NaN for never")


def _heat_maps(figure: Figure, maps: Sequence[Heat], title: str, most: int) -> None:
    figure.set_layout_engine("none")  # cells of equal size: every place is known
    cell = min(CELL[0], (FULL - 2) / max(len(heat.columns) for heat in maps))
    places = _places(maps, (cell, cell * CELL[1] / CELL[0]))
    width = max(
        6.5,
        0.3 + 0.105 * len(title),
        *(_right(heat, place) for heat, place in zip(maps, places, strict=True)),
    )
    height = max(place.top + place.height for place in places) + 1.7
    figure.set_size_inches(width, height)
    scale = _scale(maps, most)
    for heat, (left, top, wide, high) in zip(maps, places, strict=True):
        axes = figure.add_axes(
            (left / width, 1 - (top + high) / height, wide / width, high / height)
        )
        _heat(axes, heat, scale, numbers=cell >= LEGIBLE)
    figure.text(0.15 / width, 1 - 0.15 / height, title, va="top", fontsize=13, fontweight="bold")
    _foot(figure, scale, most)


def _places(maps: Sequence[Heat], cell: tuple[float, float]) -> list[_Place]:
    """From left to right, and on to the next row where a map would not fit."""
    places: list[_Place] = []
    x, top, deepest = 0.0, 0.75, 0.0
    for heat in maps:
        margin = 0.5 + 0.075 * max(map(len, heat.rows))
        place = _Place(x + margin, top, cell[0] * len(heat.columns), cell[1] * len(heat.rows))
        if x and _right(heat, place) > FULL:
            top, deepest = deepest + 1.0, 0.0
            place = place._replace(left=margin, top=top)
        places.append(place)
        x, deepest = _right(heat, place), max(deepest, top + place.height)
    return places


def _right(heat: Heat, place: _Place) -> float:
    """Where the next map may begin: cells and title both need their room."""
    return place.left + max(place.width, 0.09 * len(heat.title)) + 0.15


def _scale(maps: Sequence[Heat], most: int) -> _Scale:
    """From the fewest rounds on any map, dark, to all of them, bright; few rounds differ as much as
    many."""
    import matplotlib as mpl
    from matplotlib.colors import LogNorm

    found = [float(value) for heat in maps for value in heat.values.flat if value >= 1]
    norm = LogNorm(min([*found, most / 2]), most, clip=True)
    return _Scale(norm, mpl.colormaps["viridis"].with_extremes(bad=NEVER))


def _heat(axes: Axes, heat: Heat, scale: _Scale, *, numbers: bool) -> None:
    axes.pcolormesh(
        heat.values, cmap=scale.colours, norm=scale.norm, edgecolors="white", linewidth=1
    )
    axes.invert_yaxis()
    axes.set_title(heat.title, loc="left", fontsize=10, fontweight="bold")
    axes.set_yticks(np.arange(len(heat.rows)) + 0.5, heat.rows)
    axes.set_xticks(np.arange(len(heat.columns)) + 0.5, heat.columns, rotation=0 if numbers else 90)
    axes.set_xlabel(heat.across)
    axes.set_ylabel(heat.down, rotation=90 if len(heat.down) > 2 else 0)
    axes.tick_params(length=0, labelsize=SMALL)
    axes.spines[:].set_visible(False)
    if numbers:
        _numbers(axes, heat, scale)
    _signs(axes, heat, numbers=numbers)


def _numbers(axes: Axes, heat: Heat, scale: _Scale) -> None:
    for row, column in np.argwhere(~np.isnan(heat.values)):
        value = heat.values[row, column]
        bright = np.dot(scale.colours(scale.norm(value))[:3], (0.3, 0.59, 0.11)) > 0.5
        ink = "#222222" if bright else "white"
        axes.text(
            column + 0.5,
            row + 0.54,
            f"{value:.0f}",
            ha="center",
            va="center",
            fontsize=SMALL,
            color=ink,
        )


def _signs(axes: Axes, heat: Heat, *, numbers: bool) -> None:
    """Stars and crosses, in a corner where the cell holds a number."""
    never = np.isnan(heat.values)
    for row, column in np.argwhere(heat.lost):
        if never[row, column] or not numbers:
            axes.plot(column + 0.5, row + 0.5, color="#444444", **report.CROSS)
        else:
            axes.plot(
                column + 0.84, row + 0.22, color="#444444", **{**report.CROSS, "markersize": 6}
            )
    if not never.all():
        for row, column in np.argwhere(heat.values == np.nanmin(heat.values)):
            axes.plot(
                column + (0.15 if numbers else 0.5),
                row + (0.22 if numbers else 0.5),
                clip_on=False,
                **STAR,
            )


def _foot(figure: Figure, scale: _Scale, most: int) -> None:
    """The scale of colours, and what has none."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    width, height = figure.get_size_inches()
    axes = figure.add_axes((0.4 / width, 0.62 / height, 2.9 / width, 0.14 / height))
    bar = figure.colorbar(ScalarMappable(*scale), cax=axes, orientation="horizontal")
    bar.set_label("rounds to the target (log scale)")
    bar.outline.set_visible(False)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if most <= 1000 else (1,)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.tick_params(labelsize=SMALL)
    handles = [
        Patch(color=NEVER, label=f"not with every seed in {most} rounds"),
        Line2D([], [], color="#444444", label="diverged", **report.CROSS),
        Line2D([], [], label="fewest rounds of its map", **STAR),
    ]
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(3.6 / width, 0.88 / height),
        frameon=False,
    )


# ---- bars ----

Bar = tuple[
    str, str, float | None, float | None
]  # label, algorithm, mean rounds (None: never) and their deviation
OURS = "fedsso"


def rounds_bars(
    path: str | Path, groups: Sequence[tuple[str, Sequence[Bar]]], *, title: str = "", most: int
) -> None:
    """Rounds to a target as bars, the fewest on top in each group; FedSSO stands out from the paler
    others."""
    integer("most", most, 1)
    if not groups:
        raise InputError("there is no group of bars to draw; give at least one")
    for name, bars in groups:
        _check_bars(name, bars, most)
    picture.draw(path, lambda figure: _rounds_bars(figure, groups, title, most))


def _check_bars(name: str, bars: Sequence[Bar], most: int) -> None:
    if not bars:
        raise InputError(f"group {name!r} is empty; give it at least one bar")
    for label, _, mean, sd in bars:
        if not (0 <= (mean or 0) <= most and 0 <= (sd or 0) < inf):
            raise InputError(
                f"bar {label!r} needs rounds from 0 to most={most}, or None; got mean={mean}, "
                f"sd={sd}"
            )


def _rounds_bars(
    figure: Figure, groups: Sequence[tuple[str, Sequence[Bar]]], title: str, most: int
) -> None:
    across = 1 if len(groups) < 3 else 2
    lengths = [
        max(len(bars) for _, bars in groups[i : i + across]) for i in range(0, len(groups), across)
    ]
    grid = figure.subplots(
        len(lengths), across, squeeze=False, height_ratios=[n + 0.2 for n in lengths]
    )
    for axes, (name, bars), length in zip(
        grid.flat, groups, np.repeat(lengths, across), strict=False
    ):
        axes.set_ylim(length - 0.4, -0.6)  # bars of one thickness
        _group(axes, name, sorted(bars, key=_rank), most)
    for axes in grid.flat[len(groups) :]:
        axes.set_axis_off()
    for axes in grid.flat[: len(groups)][-across:]:
        axes.set_xlabel("communication rounds")
        axes.tick_params(labelbottom=True)
    width = 6.5 if across == 1 else 11
    report.heading(figure, fill(title, int(width / 0.11)))
    figure.set_size_inches(width, 0.9 + 0.27 * sum(lengths) + 0.45 * len(lengths))


def _rank(bar: Bar) -> float:
    return inf if bar[2] is None else bar[2]


def _group(axes: Axes, name: str, bars: Sequence[Bar], most: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(name, loc="left", fontsize=10, fontweight="bold")
    axes.grid(True, axis="x")
    axes.set_xticks(
        [
            tick
            for tick in MaxNLocator(5, steps=[1, 2, 5, 10], integer=True).tick_values(0, most)
            if tick <= most
        ]
    )
    axes.set_xlim(0, 1.28 * most)  # with room for the numbers
    axes.set_yticks(range(len(bars)), [label for label, *_ in bars])
    axes.tick_params(axis="y", length=0, labelcolor="#222222")
    axes.tick_params(axis="x", labelbottom=False)
    for place, (bar, tick) in enumerate(zip(bars, axes.get_yticklabels(), strict=True)):
        weight = "bold" if bar[1] == OURS else "normal"
        tick.set_fontweight(weight)
        text, end = (
            _never(axes, place, most)
            if bar[2] is None
            else _bar(axes, place, bar[1], bar[2], bar[3])
        )
        axes.text(end + 0.015 * most, place, text, va="center", fontsize=SMALL, fontweight=weight)


def _never(axes: Axes, place: int, most: int) -> tuple[str, float]:
    """A grey bar; what to write, and where."""
    axes.barh(place, most, height=0.72, color=NEVER)
    return f"not with every seed in {most} rounds", 0.0


def _bar(
    axes: Axes, place: int, algorithm: str, mean: float, sd: float | None
) -> tuple[str, float]:
    """A bar with its deviation; what to write, and where."""
    color = report.style(algorithm).color
    axes.barh(
        place, mean, height=0.72, color=color if algorithm == OURS else report.shade(color, 0.5)
    )
    if sd is None:
        return f"{mean:.0f}", mean
    axes.errorbar(mean, place, xerr=sd, color="#444444", lw=1, capsize=2.5)
    return f"{mean:.1f} ± {sd:.1f}", mean + sd
