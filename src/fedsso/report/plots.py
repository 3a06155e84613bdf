"""Test accuracy and training loss over the rounds, as a picture for a paper.

`plot` draws the whole picture. The functions below it draw its parts: lines, axes and legends.
The figures with several panels (`report.figures`) and the benchmarks use them too, so that all
pictures look alike.

Every function that takes `axes` or a `figure` draws onto it and changes nothing else. matplotlib
is optional: it is imported within the functions that need it, not with this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..experiment.trace import ACCURACY
from ..support import picture
from .styles import DARK, looks, styles
from .tables import found_by, name_of, renamed, series

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..experiment.trace import Trace
    from .styles import Style
    from .tables import Curve

# The columns of a trace that are drawn, from left to right, unless others are asked for.
METRICS = (ACCURACY, "train_loss")
NAMES = {ACCURACY: "test accuracy", "train_loss": "training loss"}
"""What an axis calls a column; any other is called by its name, without underscores."""
CROSS: dict[str, Any] = {
    "marker": "X",
    "markersize": 9,
    "markeredgecolor": "white",
    "linestyle": "none",
}
"""The mark of a run that diverged."""

FEW = 25  # rounds whose values are marked by dots


@dataclass(frozen=True)
class Layout:
    """What a user may choose about a picture; `plot` says what each field means."""

    title: str = ""
    targets: Sequence[float] = ()
    metrics: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    colors: Mapping[str, str] = field(default_factory=dict)
    size: tuple[float, float] | None = None


def plot(
    curves: Sequence[Curve],
    path: str | Path,
    *,
    title: str = "",
    targets: Sequence[float] = (),
    metrics: str | Sequence[str] = (),
    labels: Mapping[str, str] | None = None,
    colors: Mapping[str, str] | None = None,
    size: tuple[float, float] | None = None,
    rc: Mapping[str, Any] | None = None,
) -> None:
    """Draw test accuracy and training loss over rounds, each in a panel.

    The mean over the seeds is a line, and their range is a band around it. A run that diverged is
    a thin line of its own that ends with a cross. What was measured only once has no curve.

    Args:
        curves: The settings to draw, at least one.
        path: The file. Its suffix decides the format: .png, or .pdf and .svg, which have no
            pixels.
        title: A heading for the picture.
        targets: Accuracies to mark by dotted lines.
        metrics: The columns of the trace to draw, or one of them; left out: accuracy and training
            loss.
        labels: Names for the legend, by the labels of the curves or by the names of algorithms.
        colors: Colours of matplotlib, by the same keys. An algorithm's colour is shaded where it
            has several curves.
        size: Width and height in inches; left out: a size that suits a screen.
        rc: Settings of matplotlib by name, such as {"font.family": "serif", "font.size": 8}.

    Raises:
        InputError: There is no curve, the format is another one, a curve, column or setting is not
            known, the file cannot be written, or matplotlib is not installed.
    """
    if not curves:
        raise InputError("there is no curve to draw; give at least one")
    wished = (metrics,) if isinstance(metrics, str) else tuple(metrics)
    for name in wished:
        for curve in curves:
            curve.traces[0][name]  # one that is not there is refused, and those that are are named
    layout = Layout(title, targets, wished, labels or {}, colors or {}, _checked_size(size))
    picture.draw(path, lambda figure: _draw(figure, curves, layout), rc)


def _checked_size(size: tuple[float, float] | None) -> tuple[float, float] | None:
    """Width and height in inches; anything but two positive numbers is refused."""
    if size is None:
        return None
    try:
        width, height = map(float, size)
    except (TypeError, ValueError):
        width, height = 0.0, 0.0
    if not 0 < width < 100 or not 0 < height < 100:
        raise InputError(
            f"size must be a width and a height in inches, such as (3.4, 2.4); got {size!r}"
        )
    return width, height


def _draw(
    figure: Figure,
    curves: Sequence[Curve],
    layout: Layout,
) -> None:
    """Draw all panels, the heading and the legend, then choose the size of the figure.

    A metric without a curve has no panel, unless it was asked for. If no metric has one, both
    panels are drawn. The size comes last, because the legend grows with the number of curves.
    """
    usual = [metric for metric in METRICS if _has_curve(curves, metric)] or METRICS
    shown = layout.metrics or usual
    looks_of = list(_styles(curves, layout.colors))
    width = 10.0 if len(shown) > 1 else 6.0
    if layout.size is not None:
        width = layout.size[0]
    panels = figure.subplots(1, len(shown), sharex=True, squeeze=False)[0]
    for axes, metric in zip(panels, shown, strict=True):
        axes.grid(True)
        round_axis(axes)
        if metric.endswith("loss"):
            low, high = loss_range(curves, metric)
            loss_axis(axes, low, high, name_of_metric(metric))
        elif metric == ACCURACY:
            accuracy_axis(axes, layout.targets)
        else:
            axes.set_ylabel(name_of_metric(metric))
        for curve, look in zip(curves, looks_of, strict=True):
            lines(axes, curve, look, metric)
    heading(figure, layout.title)
    labels = [curve.label for curve in renamed(curves, layout.labels)]
    handles = [*keys(labels, looks_of), *marks(curves)]
    rows = legend(figure, handles, width)
    figure.set_size_inches(layout.size or (width, 4.1 + 0.22 * rows))


def _styles(curves: Sequence[Curve], colors: Mapping[str, str]) -> Iterator[Style]:
    """The style of each curve, with the colours that the user wants.

    A colour for an algorithm takes the place of its own, before it is shaded. A colour for the
    label of a curve is taken as it is.
    """
    known = looks(curve.algorithm for curve in curves)
    own: dict[int, str] = {}
    for key, color in colors.items():
        places = found_by(curves, key)
        if key in known and key not in [curve.label for curve in curves]:
            known[key] = known[key]._replace(color=_hex(color))
        else:
            own |= dict.fromkeys(places, _hex(color))
    for place, look in enumerate(styles(curves, known)):
        yield look._replace(color=own[place]) if place in own else look


def _hex(color: str) -> str:
    """A colour of matplotlib as "#RRGGBB"."""
    from matplotlib.colors import to_hex

    try:
        return to_hex(color).upper()
    except ValueError:
        raise InputError(
            f"a colour is a name such as 'black', or '#RRGGBB'; got {color!r}"
        ) from None


def name_of_metric(metric: str) -> str:
    """What an axis calls a column of the trace.

    >>> name_of_metric("test_loss")
    'test loss'
    """
    return NAMES.get(metric, metric.replace("_", " "))


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
        size = 1.3 * _font_size()
        figure.suptitle(title, x=0.012, ha="left", fontsize=size, fontweight="bold")


def _font_size() -> float:
    """The size of letters in this picture, in points."""
    from matplotlib import rcParams

    return float(rcParams["font.size"])


# ---- lines ----


def lines(
    axes: Axes,
    curve: Curve,
    look: Style,
    metric: str,
) -> None:
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
    text: dict[str, Any] = {"va": "center", "fontsize": 0.8 * _font_size(), "color": "#777777"}
    for target in targets:
        axes.axhline(
            target,
            color="#888888",
            lw=0.8,
            ls=(0, (2, 3)),
            zorder=1,
        )
        axes.text(1.01, target, name_of(target), transform=where, **text)


def loss_axis(
    axes: Axes,
    low: float,
    high: float,
    name: str = NAMES["train_loss"],
) -> None:
    """A loss upwards, in logarithmic scale, with numbers one can read.

    `low` and `high` are the limits of the axis, both positive. Powers of ten alone would leave a
    narrow range without a tick. So the ticks depend on the range: even steps below a factor of 4,
    then 1, 2 and 5 in each power of ten, and powers of ten from a factor of 400 on. A loss of
    zero or below cannot be shown in this scale, and leaves a gap.
    """
    from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, NullLocator

    axes.set_yscale("log", nonpositive="mask")
    axes.set(ylabel=f"{name} (log scale)", ylim=(low, high))
    ticks: Locator = LogLocator()
    if high / low < 4:
        ticks = MaxNLocator(6)
    elif high / low < 400:
        ticks = LogLocator(subs=(1, 2, 5))
    axes.yaxis.set_major_locator(ticks)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def loss_range(curves: Sequence[Curve], metric: str = "train_loss") -> tuple[float, float]:
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
                calm += _losses(trace, metric)
            else:
                wild += _losses(trace, metric)
    every = [*calm, *wild] or [1.0]
    typical = calm or wild[:1] or every
    low = min(every)
    high = min(max(every), 10 * max(typical))
    # A margin of 5 % in logarithms; where all losses are equal, 2 % of their value.
    margin = max((high / low) ** 0.05, 1.02)
    return low / margin, high * margin


def _losses(trace: Trace, metric: str) -> list[float]:
    """The positive losses of a column, clipped to what an axis can show.

    Beyond 1e30 the width of the range, a quotient of two losses, could overflow.
    """
    _, values = series([trace], metric)
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
    if any(len(curve.traces) > 1 and not curve.is_repeated for curve in curves):
        found.append(Patch(color="#888888", alpha=0.3, lw=0, label="range over seeds"))
    if any(_diverges(curve) for curve in curves):
        found.append(Line2D([], [], color=DARK, label="diverged", **CROSS))
    return found


def _diverges(curve: Curve) -> bool:
    """Whether some seed of the curve diverges."""
    return any(trace.diverged is not None for trace in curve.traces)


def legend(
    figure: Figure,
    handles: Sequence[Any],
    width: float,
) -> int:
    """Put a legend below the panels of a figure that is `width` inches wide.

    The width of an entry is estimated from the length of its text, since texts have no size
    before the figure is drawn.

    Returns:
        How many rows the legend takes.
    """
    size = _font_size() / 10
    widths = [size * (0.7 + 0.08 * len(handle.get_label())) for handle in handles]
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
