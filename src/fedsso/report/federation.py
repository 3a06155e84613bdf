"""A federation to look at: figures of its skew, a picture in plain text and one for a paper.

Symbols: N clients, n_i rows of client i (training and test together), n all rows, q_ic the share of
label c among the rows of client i, q_c its share among all rows.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unicodedata import east_asian_width

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data.federation import Federation, label_skew
from ..errors import integer
from ..support.picture import draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# ---- the figures ----


def skew(fed: Federation) -> dict[str, float]:
    """How unequal the clients are, in a few numbers; those of labels are left out where targets are
    real.

    clients, rows       N and n
    rows_min ...        the least, the median and the most of n_i
    size_gini           sum_ij |n_i - n_j| / (2 N n): 0 for equal sizes, 1 - 1/N when one holds
                        everything; unlike the coefficient of variation it is bounded, so
                        federations of any size compare
    largest_share       max_i n_i / n
    label_skew          mean_i D_i with D_i = 1/2 sum_c |q_ic - q_c|, the total-variation distance:
                        0 for all alike
    label_skew_max      max_i D_i, the client least like the federation
    labels_held         mean_i of the number of labels with q_ic > 0
    effective_labels    exp(mean_i H_i) with H_i = -sum_c q_ic ln q_ic: labels held, were all held
                        equally
    """
    rows = _rows(fed)
    figures = {
        "clients": fed.clients,
        "rows": int(rows.sum()),
        "rows_min": int(rows.min()),
        "rows_median": float(rows.double().quantile(0.5)),
        "rows_max": int(rows.max()),
        "size_gini": _gini(rows),
        "largest_share": int(rows.max()) / int(rows.sum()),
    }
    return figures | _label_figures(fed.label_counts().cpu().double()) if fed.classes else figures


def _rows(fed: Federation) -> Tensor:
    """n_i."""
    return (fed.train_sizes + fed.test_sizes).cpu()


def _gini(rows: Tensor) -> float:
    """The double sum over pairs as one sum over the sizes in ascending order."""
    ascending, N = rows.sort().values.double(), len(rows)
    rank = torch.arange(1, N + 1)
    return float(((2 * rank - N - 1) * ascending).sum() / (N * ascending.sum()))


def _label_figures(counts: Tensor) -> dict[str, float]:
    q, D = counts / counts.sum(1, keepdim=True), label_skew(counts)
    return {
        "label_skew": float(D.mean()),
        "label_skew_max": float(D.max()),
        "labels_held": float((counts > 0).sum(1).double().mean()),
        "effective_labels": float(torch.special.entr(q).sum(1).mean().exp()),
    }


# ---- the picture in plain text ----

SHADES = "·░▒▓█"
EDGES = (0.05, 0.25, 0.5, 0.75)  # between the shades, in parts of the largest share
LINES = 40  # clients shown one by one; of more only the largest and the smallest
BAR = 10  # columns that the bar of rows has at least


def text(fed: Federation, width: int = 100) -> str:
    """One line for each client, its labels as shades and its rows as a bar, then the figures; no
    line is wider."""
    table, legend = _table(fed, integer("width", width, 40))
    notes = [f"note: {note}" for note in fed.notes]
    below = [line for said in (*legend, *_sentences(fed), *notes) for line in _wrapped(said, width)]
    return "\n".join([*_wrapped(repr(fed), width), "", *table, "", *below])


def _table(fed: Federation, width: int) -> tuple[list[str], list[str]]:
    """Heading and clients, column by column from what is left of the width; and what the signs
    mean."""
    rows, names = _rows(fed), _names(fed)
    shown = _shown(rows)
    blocks = [_name_column([names[i] for i in shown], min(16, width // 5))]
    sizes = _right(["rows", *(str(int(rows[i])) for i in shown)])
    room = width - _columns(blocks[0][0]) - len(sizes[0]) - 4
    legend: list[str] = []
    if fed.classes:
        labels, legend = _label_columns(fed, shown, room - BAR - 2)
        blocks.append(labels)
        room -= len(labels[0]) + 2
    blocks += [sizes, ["", *_bars(fed, shown, min(40, room))]]
    table = ["  ".join(cells).rstrip() for cells in zip(*blocks, strict=True)]
    legend += ["Bars: █ training rows, ░ test rows."] if len(fed.test_rows) else []
    if len(shown) < fed.clients:
        half = LINES // 2
        table.insert(1 + half, "⋮")
        legend.append(
            f"The {half} largest and the {half} smallest clients; {fed.clients - LINES} between "
            f"them."
        )
    return table, legend


def _shown(rows: Tensor) -> list[int]:
    """All clients in their order, or the largest and the smallest, large first."""
    if len(rows) <= LINES:
        return list(range(len(rows)))
    order: list[int] = rows.argsort(descending=True, stable=True).tolist()
    return [*order[: LINES // 2], *order[-(LINES // 2) :]]


def _names(fed: Federation) -> list[str]:
    """Names of the clients, or their numbers; what cannot be printed becomes a question mark."""
    names = fed.client_names or [str(i) for i in range(fed.clients)]
    return ["".join(c if c.isprintable() else "?" for c in name) for name in names]


def _name_column(names: Sequence[str], most: int) -> list[str]:
    short = [_cut(name, most) for name in ("client", *names)]
    wide = max(map(_columns, short))
    return [name + " " * (wide - _columns(name)) for name in short]


def _columns(name: str) -> int:
    """Columns that a text takes: two for each Chinese, Japanese or Korean character."""
    return sum(2 if east_asian_width(c) in "WF" else 1 for c in name)


def _cut(name: str, most: int) -> str:
    """The name, its end replaced by an ellipsis where it is too wide."""
    if _columns(name) <= most:
        return name
    while _columns(name) > most - 1:
        name = name[:-1]
    return name + "…"


def _right(cells: Sequence[str]) -> list[str]:
    wide = max(map(len, cells))
    return [cell.rjust(wide) for cell in cells]


def _label_columns(fed: Federation, shown: Sequence[int], room: int) -> tuple[list[str], list[str]]:
    """A heading and one line of shades for each client, and what they mean."""
    per = math.ceil(fed.classes / room)  # neighbouring labels in one column
    cell = min(3, max(1, room // fed.classes))
    share = _shares(fed)
    grouped = np.add.reduceat(share, np.arange(0, fed.classes, per), axis=1)
    top = float(grouped.max())
    lines = ["".join(_cell(q, top, cell) for q in grouped[i]) for i in shown]
    bounds = [f"{shade} < {top * edge:.2g}" for shade, edge in zip(SHADES[:-1], EDGES, strict=True)]
    legend = [f"Share of the client's rows: blank none, {', '.join(bounds)}, {SHADES[-1]} more."]
    if per > 1:
        legend.append(f"A column is {per} neighbouring labels, headed by the first.")
    return [_heading(grouped.shape[1], per, cell), *lines], legend


def _shares(fed: Federation) -> NDArray[np.float64]:
    """q_ic."""
    counts = fed.label_counts().cpu().double()
    q: NDArray[np.float64] = (counts / counts.sum(1, keepdim=True)).numpy()
    return q


def _cell(share: float, top: float, cell: int) -> str:
    shade = SHADES[int(np.digitize(share / top, EDGES))] if share else " "
    return (shade * max(1, cell - 1)).ljust(cell)


def _heading(columns: int, per: int, cell: int) -> str:
    """Labels above their columns, at even steps that leave a blank between two."""
    wide = len(str((columns - 1) * per)) + 1
    step = next(s for s in (1, 2, 5, 10, 20, 50, columns) if s * cell >= wide)
    marks = [str(c * per) for c in range(0, columns, step)]
    if len(marks[-1]) > columns * cell - (len(marks) - 1) * step * cell:
        marks[-1] = ""  # half a number would be another one
    return "".join(mark.ljust(step * cell) for mark in marks)[: columns * cell].ljust(
        columns * cell
    )


def _bars(fed: Federation, shown: Sequence[int], length: int) -> list[str]:
    """Training rows dark and test rows light; the largest client's bar has the whole length."""
    rows, train = _rows(fed), fed.train_sizes.cpu()
    scale = length / int(rows.max())
    ends = [(round(int(train[i]) * scale), round(int(rows[i]) * scale)) for i in shown]
    return [("█" * dark + "░" * (end - dark)) or "▏" for dark, end in ends]


def _sentences(fed: Federation) -> list[str]:
    """The figures in words."""
    f = skew(fed)
    sizes = (
        f"Rows of a client: {f['rows_min']} to {f['rows_max']}, median {f['rows_median']:g}; Gini "
        f"{f['size_gini']:.2f} "
        f"(0: equal sizes); the largest client's share {f['largest_share']:.3f}."
    )
    if not fed.classes:
        return [sizes]
    return [
        sizes,
        f"Label skew {f['label_skew']:.3f} (0: all alike, near 1: disjoint), "
        f"worst client {f['label_skew_max']:.3f}; "
        f"a client holds {f['labels_held']:.3g} of {fed.classes} labels on average, "
        f"as many as {f['effective_labels']:.3g} held equally.",
    ]


def _wrapped(line: str, width: int) -> list[str]:
    return textwrap.wrap(line, width, subsequent_indent="  ")


# ---- the picture ----

TRAIN, TEST = "#0072B2", "#9CCBE8"  # one hue, dark and light: told apart by everybody and in print
PIXELS = 1000  # lines of a heat map that a picture can show
HEAD = 0.6  # inches for the two lines above the panels
CLIENTS, LABELS = 60, 100  # that have room for bubbles; more become a heat map


def picture(fed: Federation, path: str | Path, title: str = "") -> Path:
    """Who holds how many rows of which label, beside the clients' sizes, as PNG, PDF or SVG by the
    path's suffix."""
    return draw(path, lambda figure: _draw(figure, fed, title))


def _size(fed: Federation) -> tuple[float, float]:
    """Inches: a line for each client while lines can be read, columns that part labels."""
    lines = fed.clients
    panel = (
        lines * min(0.3, max(0.16, 5.4 / lines))
        if lines <= CLIENTS
        else min(9.0, max(5.0, 0.02 * lines))
    )
    wide = min(14.0, 10 + 0.08 * max(0, fed.classes - 25)) if fed.classes else 8.0
    return wide, panel + HEAD + 1.1


def _draw(figure: Figure, fed: Federation, title: str) -> None:
    wide, high = _size(fed)
    figure.set_size_inches(wide, high)
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - HEAD / high))  # type: ignore[union-attr, call-arg]
    _head(figure, fed, title)
    if not fed.classes:
        sizes = figure.subplots()
        _client_axis(sizes, fed)
        _sizes(sizes, fed)
        return
    matrix = min(wide - 3.6, max(2.8, 0.64 * fed.classes))
    labels, sizes = figure.subplots(1, 2, sharey=True, width_ratios=[matrix, wide - matrix])
    _client_axis(labels, fed)
    _label_axis(labels, fed.classes)
    _sizes(sizes, fed)
    figure.draw_without_rendering()  # the panels get their sizes, which the bubbles need
    (_bubbles if _few(fed) else _heat_map)(labels, fed)


def _few(fed: Federation) -> bool:
    """Whether there is room for bubbles."""
    return fed.clients <= CLIENTS and fed.classes <= LABELS


def _head(figure: Figure, fed: Federation, title: str) -> None:
    """Data set and partition, or the user's title; below it the federation in numbers."""
    f, partition = skew(fed), fed.source.get("partition")
    own = title or (f"{fed.name}, partition {partition}" if partition else fed.name)
    said = [f"{fed.clients:,} client{'s' * (fed.clients > 1)}", f"{f['rows']:,} rows"]
    said += [f"label skew {f['label_skew']:.3f}"] if fed.classes else ["real targets"]
    said += (
        [f"area of a bubble: rows, {fed.label_counts().max():,} at most"]
        if fed.classes and _few(fed)
        else []
    )
    inch = 1 / figure.get_figheight()
    own = _cut(own, int(8 * figure.get_figwidth()))
    figure.text(0.012, 1 - 0.1 * inch, own, va="top", fontsize=13, fontweight="bold")
    figure.text(0.012, 1 - 0.36 * inch, " · ".join(said), va="top", color="#555555")


def _client_axis(axes: Axes, fed: Federation) -> None:
    """The first client on top; names where the lines are wide enough for them."""
    from matplotlib.ticker import MaxNLocator

    axes.set(ylim=(fed.clients - 0.5, -0.5), ylabel="client")
    if fed.clients <= CLIENTS:
        names = [_cut(name, 24) for name in _names(fed)]
        axes.set_yticks(range(fed.clients), names, fontsize=9 if fed.clients <= 30 else 7)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True))
    axes.tick_params(length=0)


def _label_axis(axes: Axes, classes: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set(xlim=(-0.6, classes - 0.4), xlabel="label")
    if classes <= 25:
        axes.set_xticks(range(classes))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(14, steps=[1, 2, 5, 10], integer=True))


def _bubbles(axes: Axes, fed: Federation) -> None:
    """A circle for each label of a client, its area the rows, the largest as wide as a line; never
    less than a dot."""
    from matplotlib.collections import EllipseCollection

    counts = fed.label_counts().cpu().numpy()
    clients, labels = counts.nonzero()
    wide = 0.95 * np.maximum(np.sqrt(counts[clients, labels] / counts.max()), 0.12)
    places = np.column_stack([labels, clients])
    circles: dict[str, Any] = {
        "units": _narrow(axes),
        "offsets": places,
        "offset_transform": axes.transData,
    }
    axes.add_collection(
        EllipseCollection(wide, wide, np.zeros_like(wide), color=TRAIN, lw=0, **circles)
    )
    axes.grid(True)


def _narrow(axes: Axes) -> str:
    """The direction in which neighbours are closer."""
    x, y = np.abs(np.diff(axes.transData.transform([(0, 0), (1, 1)]), axis=0)[0])
    return "x" if x < y else "y"


def _heat_map(axes: Axes, fed: Federation) -> None:
    """The share of each label in a client's rows; where clients outnumber pixels, the mean of
    neighbours."""
    lines = np.array_split(_shares(fed), min(fed.clients, PIXELS))
    box = (-0.5, fed.classes - 0.5, fed.clients - 0.5, -0.5)
    q = np.array([line.mean(0) for line in lines])
    image = axes.imshow(q, cmap="Blues", vmin=0, interpolation="nearest", aspect="auto", extent=box)
    what = "share of the client's rows" + ", mean of neighbours" * (fed.clients > PIXELS)
    axes.figure.colorbar(image, ax=axes, label=what, pad=0.01, aspect=40)


def _sizes(axes: Axes, fed: Federation) -> None:
    """Training and test rows of each client, one after the other."""
    train, rows = fed.train_sizes.cpu().numpy(), _rows(fed).numpy()
    parts = {"training": (np.zeros_like(train), train, TRAIN), "test": (train, rows, TEST)}
    for name, (start, end, colour) in parts.items():
        if (start < end).any():
            _bars_between(axes, start, end, color=colour, label=name)
    _row_axis(axes, int(rows.max()))
    if fed.clients <= CLIENTS:
        for i, n in enumerate(rows):
            axes.annotate(
                f"{n:,}", (n, i), (3, -0.5), textcoords="offset points", va="center", fontsize=8
            )
    else:
        axes.grid(True, axis="x")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, borderaxespad=0.2)


def _bars_between(axes: Axes, start: NDArray[Any], end: NDArray[Any], **look: Any) -> None:
    """A bar for each client; a single outline where there are many."""
    if len(start) <= CLIENTS:
        axes.barh(range(len(start)), end - start, 0.72, start, **look)
    else:
        edges = np.arange(len(start) + 1) - 0.5
        axes.stairs(end, edges, baseline=start, orientation="horizontal", fill=True, **look)


def _row_axis(axes: Axes, most: int) -> None:
    """Few enough ticks for long numbers; the layout makes room for the number beside the longest
    bar."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set(xlim=(0, 1.02 * most), xlabel="rows")
    axes.xaxis.set_major_locator(
        MaxNLocator(4 if most < 100_000 else 3, steps=[1, 2, 2.5, 5, 10], integer=True)
    )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.tick_params(length=0)
