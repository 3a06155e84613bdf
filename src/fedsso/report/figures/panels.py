"""Curves beside published ones: training loss above test accuracy, a column for each panel.

One legend serves all columns. The label of a curve is a name and then its settings, as in
"FedSSO α=0.001 η=1". Where a name has one setting in each panel, but not the same in all, the
legend shows the name and the settings stand below their column.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...errors import InputError
from ...support import picture
from .. import plots
from ..styles import GREY, SMALL, style, styles
from ..tables import check, series

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from ..styles import Style
    from ..tables import Curve

DOT: dict[str, Any] = {
    "marker": "o",
    "markersize": 3.6,
    "markeredgecolor": "white",
    "markeredgewidth": 0.4,
    "ls": "none",
}
SETTINGS = re.compile(r"[\s,(]+(\w+ ?=.*?)\)?$")  # where a label's settings begin


class Dots(NamedTuple):
    """A published curve of test accuracy, which is drawn as dots.

    The dots have the colour of the algorithm. One entry of the legend stands for all of one
    label.
    """

    label: str
    algorithm: str
    # One round and one accuracy for each dot; both are equally long.
    rounds: Sequence[int]
    accuracy: Sequence[float]


class Panel(NamedTuple):
    """One column of a figure: the training loss above the test accuracy of some curves.

    It needs a curve or dots, at least one of either. Dots are drawn among the accuracies.
    """

    title: str
    curves: Sequence[Curve]
    dots: Sequence[Dots] = ()


class _Line(NamedTuple):
    """A curve, the two parts of its label, and how it is drawn in every panel.

    `settings` is empty where the legend tells the whole label.
    """

    curve: Curve
    name: str
    settings: str
    look: Style


def panels(
    path: str | Path,
    columns: Sequence[Panel],
    *,
    title: str = "",
) -> None:
    """Draw training loss above test accuracy, a column for each panel, one legend for all.

    Args:
        path: The file. Its suffix decides the format: .png, .pdf or .svg.
        columns: The panels from left to right, at least one.
        title: A heading for the picture.

    Raises:
        InputError: There is no panel, a panel has nothing to show, a curve has no traces, dots
            have more rounds than accuracies or fewer, or the picture cannot be written.
    """
    if not columns:
        raise InputError("there is no panel to draw; give at least one")
    for panel in columns:
        _check_panel(panel)
    picture.draw(path, lambda figure: _panels(figure, columns, title))


def _check_panel(panel: Panel) -> None:
    """Refuse a panel with nothing in it, and dots that are not pairs."""
    if not (panel.curves or panel.dots):
        raise InputError(f"panel {panel.title!r} is empty; give it a curve, or dots")
    for curve in panel.curves:
        check(curve)
    for dots in panel.dots:
        if len(dots.rounds) != len(dots.accuracy):
            lengths = f"{len(dots.rounds)} rounds and {len(dots.accuracy)} accuracies"
            raise InputError(
                f"dots {dots.label!r} have {lengths}; give one accuracy for each round"
            )


def _panels(figure: Figure, columns: Sequence[Panel], title: str) -> None:
    """Draw all columns, the heading and the legends, then choose the size of the figure.

    Only the first column names the vertical axes. The figure grows with its number of columns,
    and with the rows of text below it.
    """
    width = 3.9 + 1.9 * len(columns)
    wide = width / len(columns)
    drawn = _lines(columns)
    pairs = figure.subplots(2, len(columns), sharex="col", squeeze=False).T
    for (loss, accuracy), panel, lines in zip(pairs, columns, drawn, strict=True):
        _column(loss, accuracy, panel, lines)
        loss.set_title(fill(panel.title, int(wide / 0.1)))
    for axes in pairs[1:].flat:
        axes.set_ylabel("")
    below = 0
    for axes, lines in zip(pairs[:, 1], drawn, strict=True):
        below = max(below, _settings(axes, lines, wide - 0.25))
    plots.heading(figure, fill(title, int(width / 0.11)))
    rows = plots.legend(figure, _handles(columns, drawn), width)
    head = 0.35 if title else 0.0
    figure.set_size_inches(width, 5.2 + head + 0.22 * rows + 0.17 * below)


# ---- labels ----


def _lines(columns: Sequence[Panel]) -> list[list[_Line]]:
    """The curves of each panel; those of one name and algorithm look alike in all of them.

    Returns:
        One list for each panel, in the order of its curves.
    """
    names = _names(columns)
    # Shades go from dark to light over the curves of an algorithm. A name counts as one curve
    # here, however many panels show it.
    first: dict[tuple[str, str], Curve] = {}
    for panel in columns:
        for curve in panel.curves:
            name, _ = names[curve.label]
            first.setdefault((name, curve.algorithm), curve)
    looks = dict(
        zip(
            first,
            styles(list(first.values())),
            strict=True,
        )
    )
    found = []
    for panel in columns:
        own = []
        for curve in panel.curves:
            name, settings = names[curve.label]
            look = looks[name, curve.algorithm]
            own.append(_Line(curve, name, settings, look))
        found.append(own)
    return found


def _names(columns: Sequence[Panel]) -> dict[str, tuple[str, str]]:
    """The name and the settings of each label.

    The whole label is the name where a panel has a name twice, or where no name has different
    settings: then there is nothing to write below the columns.

    Returns:
        (name, settings) by label.
    """
    divided: dict[str, tuple[str, str]] = {}
    twice = False
    names: set[str] = set()
    for panel in columns:
        own = []
        for curve in panel.curves:
            divided[curve.label] = _divided(curve.label)
            own.append(divided[curve.label][0])
        twice = twice or len(set(own)) < len(own)
        names.update(own)
    # As many names as labels: every name has one setting, which may as well stay in the legend.
    if twice or len(names) == len(divided):
        return {label: (label, "") for label in divided}
    return divided


def _divided(label: str) -> tuple[str, str]:
    """A label's name and its settings; these are empty where the label has none.

    >>> _divided("FedSSO α=0.001 η=1"), _divided("FedAvg")
    (('FedSSO', 'α=0.001 η=1'), ('FedAvg', ''))
    """
    found = SETTINGS.search(label)
    if found is None:
        return label, ""
    return label[: found.start()], found[1]


# ---- a column ----


def _column(
    loss: Axes,
    accuracy: Axes,
    panel: Panel,
    lines: Sequence[_Line],
) -> None:
    """Draw the two panels of a column.

    Args:
        loss: The upper panel.
        accuracy: The lower panel. Both share their rounds, so only this one names them.
        panel: What the column shows.
        lines: Its curves with their styles.
    """
    for axes in (loss, accuracy):
        axes.grid(True)
        plots.round_axis(axes)
    low, high = plots.loss_range(panel.curves)
    plots.loss_axis(loss, low, high)
    plots.accuracy_axis(accuracy)
    _cut_dips(accuracy, panel.curves)  # first: a cross stays within the axes
    for line in lines:
        plots.lines(loss, line.curve, line.look, "train_loss")
        plots.lines(accuracy, line.curve, line.look, "test_accuracy")
    for dots in panel.dots:
        color = style(dots.algorithm).color
        accuracy.plot(dots.rounds, dots.accuracy, color=color, zorder=4, **DOT)
    loss.set_xlabel("")


def _cut_dips(axes: Axes, curves: Sequence[Curve]) -> None:
    """Where curves start high, keep short dips of a few rounds from deciding the scale.

    The axis begins a little below the usual low, if a dip would take more than three tenths of
    the height for itself. The part of the dip that lies lower is then out of sight. Runs that
    diverged do not count for the usual low, but they do for the dips.
    """
    calm: list[NDArray[Any]] = []
    every: list[NDArray[Any]] = []
    for curve in curves:
        finite = [trace for trace in curve.traces if trace.diverged is None]
        calm.append(series(finite, "test_accuracy")[1])
        every.append(series(curve.traces, "test_accuracy")[1])
    starts = [_usual_low(values) for values in calm if values.size]
    if not starts:
        return
    low = min(starts)
    bottom = min(float(np.nanmin(values)) for values in every if values.size)
    top = max(float(np.nanmax(values)) for values in every if values.size)
    if low - bottom > 0.3 * (top - bottom):
        axes.set_ylim(low - 0.15 * (top - low), top + 0.1 * (top - low))


def _usual_low(values: NDArray[Any]) -> float:
    """The accuracy at the start or in the lowest tenth of the rounds, whichever is less.

    `values` [seeds, rounds] are the accuracies of one curve.
    """
    start = float(np.nanmean(values[:, 0]))
    tenth = float(np.nanquantile(values, 0.1))
    return min(start, tenth)


# ---- legends ----


def _settings(axes: Axes, lines: Sequence[_Line], width: float) -> int:
    """Write the settings of a column's curves below it, where the legend does not tell them.

    Args:
        axes: The lower panel of the column.
        lines: Its curves.
        width: The room for the texts, in inches.

    Returns:
        How many rows they take.
    """
    from matplotlib.transforms import ScaledTranslation

    told = [line for line in lines if line.settings]
    if not told:
        return 0
    widths = [0.42 + 0.067 * len(line.settings) for line in told]
    rows, columns = plots.legend_shape(widths, width)
    texts = [line.settings for line in told]
    looks = [line.look for line in told]
    # From the corner of the panel into the margin, below the numbers and the name of its axis.
    lower_left = ScaledTranslation(-0.45, -0.5, axes.figure.dpi_scale_trans)
    axes.legend(
        handles=plots.keys(texts, looks),
        loc="upper left",
        bbox_to_anchor=(0, 0),
        bbox_transform=axes.transAxes + lower_left,
        ncols=columns,
        fontsize=SMALL,
        frameon=False,
        borderaxespad=0,
        handlelength=2,
        columnspacing=1,
    )
    return rows


def _handles(
    columns: Sequence[Panel],
    drawn: Sequence[Sequence[_Line]],
) -> list[Any]:
    """The entries of the legend: names, what bands and crosses mean, and each kind of dots.

    A name that several panels show has one entry.
    """
    looks: dict[tuple[str, str], Style] = {}
    curves: list[Curve] = []
    for lines in drawn:
        for line in lines:
            looks[line.name, line.curve.algorithm] = line.look
            curves.append(line.curve)
    names = [name for name, _ in looks]
    keys = plots.keys(names, list(looks.values()))
    return [*keys, *plots.marks(curves), *_dot_keys(columns)]


def _dot_keys(columns: Sequence[Panel]) -> list[Any]:
    """An entry for each label of dots, grey where these have several colours."""
    from matplotlib.lines import Line2D

    colors: dict[str, set[str]] = {}
    for panel in columns:
        for dots in panel.dots:
            colors.setdefault(dots.label, set()).add(style(dots.algorithm).color)
    found = []
    for label, own in colors.items():
        color = min(own) if len(own) == 1 else GREY
        found.append(Line2D([], [], color=color, label=label, **DOT))
    return found
