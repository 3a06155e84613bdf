"""Rounds to a target as bars, in groups: the fewest on top, and FedSSO in full colour.

A group is a task with its target, and a bar is an algorithm on this task. All groups of a figure
have the same scale, and all bars the same thickness, so that groups can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np

from ...errors import InputError, integer
from ...support import picture
from ..plots import heading
from ..styles import DARK, NEVER, SMALL, shade, style

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Bar = tuple[str, str, float | None, float | None]
"""A bar: its label, its algorithm, the mean rounds (None: never) and their standard deviation."""

Group = tuple[str, Sequence[Bar]]
"""The name of a group and its bars."""

OURS = "fedsso"
THICK = 0.72  # of a bar, in parts of the distance between two


def rounds_bars(
    path: str | Path,
    groups: Sequence[Group],
    *,
    title: str = "",
    most: int,
) -> None:
    """Draw rounds to a target as bars, the fewest on top in each group.

    FedSSO stands out: the other algorithms are drawn in paler shades of their colours.

    Args:
        path: The file. Its suffix decides the format: .png, .pdf or .svg.
        groups: Names and bars, at least one group.
        title: A heading for the picture.
        most: The rounds of a run. A setting that never reaches the target has a grey bar of this
            length.

    Raises:
        InputError: A group is empty, a number of rounds is negative or beyond `most`, or the
            picture cannot be written.
    """
    integer("most", most, 1)
    if not groups:
        raise InputError("there is no group of bars to draw; give at least one")
    for name, bars in groups:
        _check_bars(name, bars, most)
    picture.draw(path, lambda figure: _rounds_bars(figure, groups, title, most))


def _check_bars(name: str, bars: Sequence[Bar], most: int) -> None:
    """Refuse an empty group, and numbers that cannot be rounds: NaN, negative, or beyond `most`."""
    if not bars:
        raise InputError(f"group {name!r} is empty; give it at least one bar")
    for label, _, mean, sd in bars:
        # Written as what must hold: a comparison with NaN is false, so NaN is refused as well.
        if not (0 <= (mean or 0) <= most and 0 <= (sd or 0) < inf):
            raise InputError(
                f"bar {label!r} needs rounds from 0 to most={most}, or None; got mean={mean}, "
                f"sd={sd}"
            )


def _rounds_bars(
    figure: Figure,
    groups: Sequence[Group],
    title: str,
    most: int,
) -> None:
    """Draw all groups, two beside each other where there are three or more.

    The height of a panel follows from the longest group of its row, so a bar has the same
    thickness everywhere. Only the lowest panel of each column names the rounds.
    """
    across = 1 if len(groups) < 3 else 2
    lengths = []  # bars of the longest group of each row
    for start in range(0, len(groups), across):
        beside = groups[start : start + across]
        lengths.append(max(len(bars) for _, bars in beside))
    ratios = [length + 0.2 for length in lengths]
    grid = figure.subplots(len(lengths), across, squeeze=False, height_ratios=ratios)
    places = zip(grid.flat, groups, np.repeat(lengths, across), strict=False)
    for axes, (name, bars), length in places:
        axes.set_ylim(length - 0.4, -0.6)  # bars of one thickness
        _group(axes, name, sorted(bars, key=_rank), most)
    # An odd number of groups leaves the last panel of two columns empty.
    for axes in grid.flat[len(groups) :]:
        axes.set_axis_off()
    used = grid.flat[: len(groups)]
    for axes in used[-across:]:
        axes.set_xlabel("communication rounds")
        axes.tick_params(labelbottom=True)
    width = 6.5 if across == 1 else 11
    heading(figure, fill(title, int(width / 0.11)))
    figure.set_size_inches(width, 0.9 + 0.27 * sum(lengths) + 0.45 * len(lengths))


def _rank(bar: Bar) -> float:
    """What bars are sorted by: mean rounds; infinity where the target is never reached."""
    return inf if bar[2] is None else bar[2]


def _group(
    axes: Axes,
    name: str,
    bars: Sequence[Bar],
    most: int,
) -> None:
    """Draw the bars of one group, with their numbers beside them.

    The bars come in the order in which they are drawn, from top to bottom. The limits of the
    vertical axis are set by the caller.
    """
    from matplotlib.ticker import MaxNLocator

    axes.set_title(name, loc="left", fontsize=10, fontweight="bold")
    axes.grid(True, axis="x")
    ticks = MaxNLocator(
        5,
        steps=[1, 2, 5, 10],
        integer=True,
    ).tick_values(0, most)
    axes.set_xticks([tick for tick in ticks if tick <= most])
    axes.set_xlim(0, 1.28 * most)  # with room for the numbers
    axes.set_yticks(range(len(bars)), [label for label, *_ in bars])
    axes.tick_params(axis="y", length=0, labelcolor="#222222")
    axes.tick_params(axis="x", labelbottom=False)
    names = axes.get_yticklabels()
    for place, (_, algorithm, mean, sd) in enumerate(bars):
        weight = "bold" if algorithm == OURS else "normal"
        names[place].set_fontweight(weight)
        if mean is None:
            text, end = _never(axes, place, most)
        else:
            text, end = _bar(axes, place, algorithm, mean, sd)
        axes.text(
            end + 0.015 * most,
            place,
            text,
            va="center",
            fontsize=SMALL,
            fontweight=weight,
        )


def _never(
    axes: Axes,
    place: int,
    most: int,
) -> tuple[str, float]:
    """Draw a grey bar for a setting that never reaches the target.

    Returns:
        What to write, and where: at the left end of the bar, which is wide enough for the text.
    """
    axes.barh(place, most, height=THICK, color=NEVER)
    return f"not with every seed in {most} rounds", 0.0


def _bar(
    axes: Axes, place: int, algorithm: str, mean: float, sd: float | None
) -> tuple[str, float]:
    """Draw a bar with its deviation, in the algorithm's colour.

    Args:
        axes: The panel.
        place: The number of the bar, from 0 at the top.
        algorithm: Its name in the registry.
        mean: The mean rounds, which are the length of the bar.
        sd: Their standard deviation. None: there is one seed, and no error bar.

    Returns:
        What to write beside the bar, and where this begins, in rounds.
    """
    color = style(algorithm).color
    if algorithm != OURS:
        color = shade(color, 0.5)
    axes.barh(place, mean, height=THICK, color=color)
    if sd is None:
        return f"{mean:.0f}", mean
    axes.errorbar(mean, place, xerr=sd, color=DARK, lw=1, capsize=2.5)
    return f"{mean:.1f} ± {sd:.1f}", mean + sd
