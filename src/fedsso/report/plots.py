"""Test accuracy and training loss over the rounds, as a picture for a paper.

`plot` draws the whole picture. The functions below it draw its parts: lines, axes and legends.
The figures with several panels (`report.figures`) and the benchmarks use them too, so that all
pictures look alike.

Every function that takes `axes` or a `figure` draws onto it and changes nothing else. matplotlib
is optional: it is imported within the functions that need it, not with this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..support import picture
from .styles import DARK, styles
from .tables import name_of, series

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..experiment.trace import Trace
    from .styles import Style
    from .tables import Curve

# The columns of a trace that are drawn, from left to right.
METRICS = ("test_accuracy", "train_loss")
CROSS: dict[str, Any] = {
    "marker": "X",
    "markersize": 9,
    "markeredgecolor": "white",
    "linestyle": "none",
}
"""The mark of a run that diverged."""

FEW = 25  # rounds whose values are marked by dots


def plot(
    curves: Sequence[Curve],
    path: str | Path,
    *,
    title: str = "",
    targets: Sequence[float] = (),
) -> None:
    """Draw test accuracy and training loss over rounds, each in a panel.

    The mean over the seeds is a line, and their range is a band around it. A run that diverged is
    a thin line of its own that ends with a cross. What was measured only once has no curve.

    Args:
        curves: The settings to draw, at least one.
        path: The file. Its suffix decides the format: .png, .pdf or .svg.
        title: A heading for the picture.
        targets: Accuracies to mark by dotted lines.

    Raises:
        InputError: There is no curve, the format is another one, the file cannot be written, or
            matplotlib is not installed.
    """
    if not curves:
        raise InputError("there is no curve to draw; give at least one")
    picture.draw(path, lambda figure: _draw(figure, curves, title, targets))


def _draw(
    figure: Figure,
    curves: Sequence[Curve],
    title: str,
    targets: Sequence[float],
) -> None:
    """Draw all panels, the heading and the legend, then choose the size of the figure.

    A metric without a curve has no panel. If no metric has one, both panels are drawn. The size
    comes last, because the legend grows with the number of curves.
    """
    shown = [metric for metric in METRICS if _has_curve(curves, metric)] or METRICS
    looks = list(styles(curves))
    width = 10 if len(shown) > 1 else 6
    panels = figure.subplots(1, len(shown), sharex=True, squeeze=False)[0]
    for axes, metric in zip(panels, shown, strict=True):
        axes.grid(True)
        round_axis(axes)
        if metric == "test_accuracy":
            accuracy_axis(axes, targets)
        else:
            low, high = loss_range(curves)
            loss_axis(axes, low, high)
        for curve, look in zip(curves, looks, strict=True):
            lines(axes, curve, look, metric)
    heading(figure, title)
    labels = [curve.label for curve in curves]
    handles = [*keys(labels, looks), *marks(curves)]
    rows = legend(figure, handles, width)
    figure.set_size_inches(width, 4.1 + 0.22 * rows)


def _has_curve(curves: Sequence[Curve], metric: str) -> bool:
    """Whether some curve has values in more than one round; a single value makes no line."""
    for curve in curves:
        rounds, _ = series(curve.traces, metric)
        if len(rounds) > 1:
            return True
    return False


def heading(figure: Figure, title: str) -> None:
    """A title in the upper left corner, unless it is empty."""
    if title:
        figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")


# ---- lines ----


def lines(axes: Axes, curve: Curve, look: Style, metric: str) -> None:
    """Draw one curve.

    The seeds that stayed finite become a line for their mean and a band for their range. Each of
    the others is drawn alone, thin, up to the cross where it diverged: its values would pull the
    mean of the others away.

    Args:
        axes: The panel.
        curve: The traces of one setting.
        look: The colour and the dashes of its lines.
        metric: The column of the traces to draw, such as "test_accuracy".
    """
    calm = [trace for trace in curve.traces if trace.diverged is None]
    rounds, values = series(calm, metric)
    if len(rounds):
        _mean_and_range(axes, rounds, values, look)
    for trace in curve.traces:
        if trace.diverged is not None:
            rounds, values = series([trace], metric)
            finite = rounds < trace.diverged  # later accuracies are 0, which stands for nothing
            _lost(axes, rounds[finite], values[0, finite], look)


def _mean_and_range(
    axes: Axes,
    rounds: NDArray[Any],
    values: NDArray[Any],
    look: Style,
) -> None:
    """A line and a band for the values [seeds, rounds] of one setting.

    NaN is left out of the mean and the range, so seeds of different lengths can be drawn
    together. A short run has a dot at each value, because few values on a line are hard to see.
    """
    marker: dict[str, Any] = {}
    if len(rounds) <= FEW:
        marker = {"marker": "o", "markersize": 3}
    axes.plot(
        rounds,
        np.nanmean(values, axis=0),
        lw=1.8,
        **look._asdict(),
        **marker,
    )
    low = np.nanmin(values, axis=0)
    high = np.nanmax(values, axis=0)
    axes.fill_between(rounds, low, high, color=look.color, alpha=0.2, lw=0)


def _lost(
    axes: Axes,
    rounds: NDArray[Any],
    values: NDArray[Any],
    look: Style,
) -> None:
    """A run that diverged: a thin line with a cross at its end.

    Draws nothing if there is no finite value. The limits of the vertical axis must be set before.
    """
    if not len(rounds):
        return
    axes.plot(rounds, values, lw=1.2, **look._asdict())
    end = np.clip(values[-1], *axes.get_ylim())  # the cross stays in sight
    axes.plot(
        rounds[-1],
        end,
        color=look.color,
        zorder=5,
        clip_on=False,
        **CROSS,
    )


# ---- axes ----


def round_axis(axes: Axes) -> None:
    """Communication rounds from left to right, with a few ticks at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("communication round")
    axes.xaxis.set_major_locator(
        MaxNLocator(
            6,
            steps=[1, 2, 5, 10],
            integer=True,
        )
    )
    axes.margins(x=0.015)


def accuracy_axis(axes: Axes, targets: Sequence[float] = ()) -> None:
    """Test accuracy upwards; each target is a dotted line with its number at the right."""
    axes.set_ylabel("test accuracy")
    # In these coordinates x is a part of the panel's width and y is an accuracy.
    where = axes.get_yaxis_transform()
    text: dict[str, Any] = {"va": "center", "fontsize": 8, "color": "#777777"}
    for target in targets:
        axes.axhline(
            target,
            color="#888888",
            lw=0.8,
            ls=(0, (2, 3)),
            zorder=1,
        )
        axes.text(1.01, target, name_of(target), transform=where, **text)


def loss_axis(axes: Axes, low: float, high: float) -> None:
    """Training loss upwards, in logarithmic scale, with numbers one can read.

    `low` and `high` are the limits of the axis, both positive. Powers of ten alone would leave a
    narrow range without a tick. So the ticks depend on the range: even steps below a factor of 4,
    then 1, 2 and 5 in each power of ten, and powers of ten from a factor of 400 on. A loss of
    zero or below cannot be shown in this scale, and leaves a gap.
    """
    from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, NullLocator

    axes.set_yscale("log", nonpositive="mask")
    axes.set(ylabel="training loss (log scale)", ylim=(low, high))
    ticks: Locator = LogLocator()
    if high / low < 4:
        ticks = MaxNLocator(6)
    elif high / low < 400:
        ticks = LogLocator(subs=(1, 2, 5))
    axes.yaxis.set_major_locator(ticks)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def loss_range(curves: Sequence[Curve]) -> tuple[float, float]:
    """The range of the positive losses, with a margin.

    Losses of runs that diverge can be huge. They are cut off above ten times the largest loss of
    the other runs, so that these stay readable. If all runs diverge, the first loss takes the
    place of that largest one. Without any loss the range lies around 1, so that an axis can be
    drawn.
    """
    calm: list[float] = []
    wild: list[float] = []
    for curve in curves:
        for trace in curve.traces:
            if trace.diverged is None:
                calm += _losses(trace)
            else:
                wild += _losses(trace)
    every = [*calm, *wild] or [1.0]
    typical = calm or wild[:1] or every
    low = min(every)
    high = min(max(every), 10 * max(typical))
    # A margin of 5 % in logarithms; where all losses are equal, 2 % of their value.
    margin = max((high / low) ** 0.05, 1.02)
    return low / margin, high * margin


def _losses(trace: Trace) -> list[float]:
    """The positive training losses, clipped to what an axis can show.

    Beyond 1e30 the width of the range, a quotient of two losses, could overflow.
    """
    _, values = series([trace], "train_loss")
    clipped = np.clip(values[values > 0], 1e-30, 1e30)
    return [float(value) for value in clipped]


# ---- legends ----


def keys(labels: Sequence[str], looks: Sequence[Style]) -> list[Any]:
    """Lines for a legend, one for each label. `looks` has the style of each."""
    from matplotlib.lines import Line2D

    found = []
    for label, look in zip(labels, looks, strict=True):
        found.append(
            Line2D(
                [],
                [],
                lw=1.8,
                label=label,
                **look._asdict(),
            )
        )
    return found


def marks(curves: Sequence[Curve]) -> list[Any]:
    """Entries of a legend that explain bands and crosses, where the curves have any.

    They are grey, because they stand for all curves.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    found: list[Any] = []
    if any(len(curve.traces) > 1 for curve in curves):
        found.append(Patch(color="#888888", alpha=0.3, lw=0, label="range over seeds"))
    if any(_diverges(curve) for curve in curves):
        found.append(Line2D([], [], color=DARK, label="diverged", **CROSS))
    return found


def _diverges(curve: Curve) -> bool:
    """Whether some seed of the curve diverges."""
    return any(trace.diverged is not None for trace in curve.traces)


def legend(figure: Figure, handles: Sequence[Any], width: float) -> int:
    """Put a legend below the panels of a figure that is `width` inches wide.

    The width of an entry is estimated from the length of its text, since texts have no size
    before the figure is drawn.

    Returns:
        How many rows the legend takes.
    """
    widths = [0.7 + 0.08 * len(handle.get_label()) for handle in handles]
    rows, columns = legend_shape(widths, width - 0.4)
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        handlelength=2.6,
    )
    return rows


def legend_shape(widths: Sequence[float], room: float) -> tuple[int, int]:
    """The fewest rows that hold entries of these widths, and how many columns they have.

    matplotlib fills a legend column by column. A column is as wide as its widest entry.

    Args:
        widths: The width of each entry, in inches.
        room: The width that is there, in inches.

    Returns:
        (rows, columns). A single column, if nothing else fits.

    >>> legend_shape([1.0, 1.0, 1.0], room=2.5)
    (2, 2)
    """
    for rows in range(1, len(widths)):
        columns = -(-len(widths) // rows)  # rounded up
        parts = np.array_split(np.array(widths), columns)
        if sum(float(own.max()) for own in parts) <= room:
            return rows, columns
    return len(widths), 1
