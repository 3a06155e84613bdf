"""A federation as a picture: who holds how many rows of which label, beside the clients' sizes.

A few clients and labels become bubbles, whose area is the number of rows. Many become a heat map
of shares, because small circles cannot be told apart. Symbols are those of `report.federation`.

`picture` writes the file. The functions below it draw the heading, the axes, the panel of labels
and the panel of sizes onto one figure. Both panels share their vertical axis: a client is a line
across the whole picture, with client 0 on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..support.picture import draw
from .federation import cut, names_of, rows_of, shares_of, skew

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from ..data.federation import Federation

# One hue, dark and light: everybody can tell them apart, and so can a printer.
TRAIN = "#0072B2"
TEST = "#9CCBE8"
PIXELS = 1000  # lines of a heat map that a picture can show
HEAD = 0.6  # inches for the two lines above the panels
CLIENTS = 60  # that have room for bubbles; more become a heat map
LABELS = 100  # the same
THICK = 0.72  # of a bar, in parts of the distance between two


def picture(
    fed: Federation,
    path: str | Path,
    title: str = "",
) -> Path:
    """Draw who holds how many rows of which label, beside the clients' sizes.

    Where targets are real numbers, there are the sizes alone.

    Args:
        fed: The federation.
        path: The file. Its suffix decides the format: .png, .pdf or .svg.
        title: The heading. By default the names of the data set and of the partition.

    Returns:
        The path.

    Raises:
        InputError: The format is another one, the file cannot be written, or matplotlib is not
            installed.
    """
    return draw(path, lambda figure: _draw(figure, fed, title))


def _draw(figure: Figure, fed: Federation, title: str) -> None:
    """Draw the heading and the panels.

    The size of the figure is chosen first, from the numbers of clients and labels: the bubbles
    must know how wide a line is.
    """
    wide, high = _size(fed)
    figure.set_size_inches(wide, high)
    # The layout leaves the upper edge to the heading.
    engine: Any = figure.get_layout_engine()
    engine.set(rect=(0, 0, 1, 1 - HEAD / high))
    _head(figure, fed, title)
    if not fed.classes:
        sizes = figure.subplots()
        _client_axis(sizes, fed)
        _sizes(sizes, fed)
        return
    # The panel of labels grows with their number, until the sizes have 3.6 inches left.
    matrix = min(wide - 3.6, max(2.8, 0.64 * fed.classes))
    labels, sizes = figure.subplots(
        1,
        2,
        sharey=True,
        width_ratios=[matrix, wide - matrix],
    )
    _client_axis(labels, fed)
    _label_axis(labels, fed.labels)
    _sizes(sizes, fed)
    figure.draw_without_rendering()  # the panels get their sizes, which the bubbles need
    if _few(fed):
        _bubbles(labels, fed)
    else:
        _heat_map(labels, fed)


def _size(fed: Federation) -> tuple[float, float]:
    """Width and height in inches.

    Each client has a line of its own as long as lines can be read, and more labels make the
    picture wider. Beyond 60 clients the height grows slowly, up to 9 inches for the panel.
    """
    lines = fed.clients
    if lines <= CLIENTS:
        panel = lines * min(0.3, max(0.16, 5.4 / lines))
    else:
        panel = min(9.0, max(5.0, 0.02 * lines))
    wide = 8.0
    if fed.classes:
        wide = min(14.0, 10 + 0.08 * max(0, fed.classes - 25))
    return wide, panel + HEAD + 1.1


def _few(fed: Federation) -> bool:
    """Whether there is room for bubbles: with more clients or labels they would be too small."""
    return fed.clients <= CLIENTS and fed.classes <= LABELS


def _head(figure: Figure, fed: Federation, title: str) -> None:
    """Write data set and partition, or the user's title; below it the federation in numbers.

    A title that is too long for the picture is cut.
    """
    # Places are parts of the height of the figure: this is one inch of it.
    inch = 1 / figure.get_figheight()
    own = title or _name(fed)
    own = cut(own, int(8 * figure.get_figwidth()))
    figure.text(
        0.012,
        1 - 0.1 * inch,
        own,
        va="top",
        fontsize=13,
        fontweight="bold",
    )
    said = " · ".join(_numbers(fed))
    figure.text(0.012, 1 - 0.36 * inch, said, va="top", color="#555555")


def _name(fed: Federation) -> str:
    """The data set and, where it is known, the partition.

    A federation of a user's own arrays has no partition, only clients.
    """
    partition = fed.source.get("partition")
    return f"{fed.name}, partition {partition}" if partition else fed.name


def _numbers(fed: Federation) -> list[str]:
    """The federation in a few numbers, and what the area of a bubble means."""
    f = skew(fed)
    word = "clients" if fed.clients > 1 else "client"
    said = [f"{fed.clients:,} {word}", f"{f['rows']:,} rows"]
    if not fed.classes:
        return [*said, "real targets"]
    said.append(f"label skew {f['label_skew']:.3f}")
    if _few(fed):
        said.append(f"area of a bubble: rows, {fed.label_counts().max():,} at most")
    return said


# ---- axes ----


def _client_axis(axes: Axes, fed: Federation) -> None:
    """Clients downwards; with their names where the lines are wide enough for them.

    Of many clients a few numbers stand at the axis. A long name is cut.
    """
    from matplotlib.ticker import MaxNLocator

    axes.set(ylim=(fed.clients - 0.5, -0.5), ylabel="client")
    if fed.clients <= CLIENTS:
        names = [cut(name, 24) for name in names_of(fed)]
        points = 9 if fed.clients <= 30 else 7
        axes.set_yticks(range(fed.clients), names, fontsize=points)
    else:
        axes.yaxis.set_major_locator(
            MaxNLocator(
                8,
                steps=[1, 2, 5, 10],
                integer=True,
            )
        )
    axes.tick_params(length=0)


def _label_axis(axes: Axes, labels: Sequence[str]) -> None:
    """Labels from left to right; every one has its name or number if there are few."""
    from matplotlib.ticker import MaxNLocator

    classes = len(labels)
    axes.set(xlim=(-0.6, classes - 0.4), xlabel="label")
    if classes <= 25:
        names = [cut(name, 14) for name in labels]
        # Beside each other, long names of many labels would overlap.
        steep = len(labels) > 3 and max(map(len, names)) > 3
        axes.set_xticks(range(classes), names, rotation=90 if steep else 0)
    else:
        axes.xaxis.set_major_locator(
            MaxNLocator(
                14,
                steps=[1, 2, 5, 10],
                integer=True,
            )
        )


def _row_axis(axes: Axes, most: int) -> None:
    """Rows from left to right, with few enough ticks for long numbers.

    `most` are the rows of the largest client. The layout makes room for the number beside the
    longest bar.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set(xlim=(0, 1.02 * most), xlabel="rows")
    ticks = 4 if most < 100_000 else 3
    axes.xaxis.set_major_locator(
        MaxNLocator(
            ticks,
            steps=[1, 2, 2.5, 5, 10],
            integer=True,
        )
    )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.tick_params(length=0)


# ---- labels ----


def _bubbles(axes: Axes, fed: Federation) -> None:
    """Draw a circle for each label of a client, whose area is its rows.

    The largest is as wide as a line, and none is less than a dot. The panels must have their
    final sizes by now.
    """
    from matplotlib.collections import EllipseCollection

    counts = fed.label_counts().cpu().numpy()
    clients, labels = counts.nonzero()
    # The area is in proportion to the rows, so the diameter is to their square root.
    share = counts[clients, labels] / counts.max()
    wide = 0.95 * np.maximum(np.sqrt(share), 0.12)
    # Diameters are in units of the closer of the two axes, so that neighbours never overlap.
    circles = EllipseCollection(
        wide,
        wide,
        np.zeros_like(wide),
        color=TRAIN,
        lw=0,
        units=_narrow(axes),
        offsets=np.column_stack([labels, clients]),
        offset_transform=axes.transData,
    )
    axes.add_collection(circles)
    axes.grid(True)


def _narrow(axes: Axes) -> Any:
    """The direction in which neighbours are closer on the paper: "x" or "y"."""
    # One step to the right and one step down, in pixels.
    corners = axes.transData.transform([(0, 0), (1, 1)])
    x, y = np.abs(np.diff(corners, axis=0)[0])
    return "x" if x < y else "y"


def _heat_map(axes: Axes, fed: Federation) -> None:
    """Draw the share of each label in a client's rows.

    Shares are shown instead of rows, or small clients would all be white. Where clients outnumber
    the lines of the picture, a line is the mean of neighbours.
    """
    lines = np.array_split(shares_of(fed), min(fed.clients, PIXELS))
    q = np.array([line.mean(0) for line in lines])
    image = axes.imshow(
        q,
        cmap="Blues",
        vmin=0,
        interpolation="nearest",
        aspect="auto",
        extent=(-0.5, fed.classes - 0.5, fed.clients - 0.5, -0.5),
    )
    what = "share of the client's rows"
    if fed.clients > PIXELS:
        what += ", mean of neighbours"
    axes.figure.colorbar(image, ax=axes, label=what, pad=0.01, aspect=40)


# ---- sizes ----


def _sizes(axes: Axes, fed: Federation) -> None:
    """Draw the training rows of each client, and after them the test rows.

    Few clients have their number of rows beside the bar, training and test together.
    """
    train = fed.train_sizes.cpu().numpy()
    rows = rows_of(fed).numpy()
    nothing = np.zeros_like(train)
    _bars_between(axes, nothing, train, TRAIN, "training")
    _bars_between(axes, train, rows, TEST, "test")
    _row_axis(axes, int(rows.max()))
    if fed.clients <= CLIENTS:
        text: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 8}
        for i, n in enumerate(rows):
            axes.annotate(
                f"{n:,}",
                (n, i),
                (3, -0.5),
                **text,
            )
    else:
        axes.grid(True, axis="x")
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=2,
        frameon=False,
        borderaxespad=0.2,
    )


def _bars_between(
    axes: Axes,
    start: NDArray[Any],
    end: NDArray[Any],
    color: str,
    label: str,
) -> None:
    """Draw a bar for each client, or one outline for many clients; nothing if all are 0.

    Args:
        axes: The panel of sizes.
        start: Where each bar begins, in rows, [clients].
        end: Where it ends, [clients].
        color: Its colour.
        label: What the legend calls these rows.
    """
    if not (start < end).any():
        return
    count = len(start)
    if count <= CLIENTS:
        axes.barh(
            range(count),
            end - start,
            THICK,
            start,
            color=color,
            label=label,
        )
        return
    # A single shape is drawn much faster than thousands of bars, and has no gaps between them.
    axes.stairs(
        end,
        np.arange(count + 1) - 0.5,
        baseline=start,
        orientation="horizontal",
        fill=True,
        color=color,
        label=label,
    )
