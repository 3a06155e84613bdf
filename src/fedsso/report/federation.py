"""A federation to look at: numbers that tell how unequal its clients are, and a table in text.

`skew` computes the numbers, `text` writes the table, which `fedsso data show` prints. The picture
of the same is in `federation_picture.py`.

Symbols: N clients, n_i rows of client i (training and test together), n all rows, q_ic the share
of label c among the rows of client i, q_c its share among all rows.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING
from unicodedata import east_asian_width

import numpy as np
import torch

from ..data.federation import label_skew
from ..errors import integer

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from ..data.federation import Federation

# From few rows to many. A label that a client does not have is a blank.
SHADES = "·░▒▓█"
EDGES = (0.05, 0.25, 0.5, 0.75)  # between the shades, in parts of the largest share
LINES = 40  # clients shown one by one; of more only the largest and the smallest
BAR = 10  # columns that the bar of rows has at least

# ---- numbers ----


def skew(fed: Federation) -> dict[str, float]:
    """How unequal the clients are, in a few numbers.

    clients, rows       N and n
    rows_min ...        the least, the median and the most of n_i
    size_gini           sum_ij |n_i - n_j| / (2 N n): 0 for equal sizes, 1 - 1/N when one client
                        holds everything. Unlike the coefficient of variation it is bounded, so
                        federations of any size compare.
    largest_share       max_i n_i / n
    label_skew          mean_i D_i with D_i = 1/2 sum_c |q_ic - q_c|, the total-variation
                        distance: 0 if all clients are alike
    label_skew_max      max_i D_i, the client least like the federation
    labels_held         mean_i of the number of labels with q_ic > 0
    effective_labels    exp(mean_i H_i) with H_i = -sum_c q_ic ln q_ic: how many labels a client
                        would hold if it held all of them equally

    Where targets are real numbers, there are no numbers of labels.
    """
    rows = rows_of(fed)
    figures = {
        "clients": fed.clients,
        "rows": int(rows.sum()),
        "rows_min": int(rows.min()),
        "rows_median": float(rows.double().quantile(0.5)),
        "rows_max": int(rows.max()),
        "size_gini": _gini(rows),
        "largest_share": int(rows.max()) / int(rows.sum()),
    }
    if fed.classes:
        figures |= _label_figures(fed.label_counts().cpu().double())
    return figures


def rows_of(fed: Federation) -> Tensor:
    """n_i: the rows of each client, int64 [N] on the CPU."""
    return (fed.train_sizes + fed.test_sizes).cpu()


def shares_of(fed: Federation) -> NDArray[np.float64]:
    """q_ic: the share of each label among the rows of each client, float64 [clients, labels].

    The shares of a client sum to 1. InputError where targets are real numbers.
    """
    counts = fed.label_counts().cpu().double()
    q: NDArray[np.float64] = (counts / counts.sum(1, keepdim=True)).numpy()
    return q


def _gini(rows: Tensor) -> float:
    """The Gini coefficient; the double sum over pairs is one sum over the sizes in order.

    With n_1 <= ... <= n_N, sum_ij |n_i - n_j| = 2 sum_i (2 i - N - 1) n_i.
    """
    ascending = rows.sort().values.double()
    N = len(rows)
    rank = torch.arange(1, N + 1)
    return float(((2 * rank - N - 1) * ascending).sum() / (N * ascending.sum()))


def _label_figures(counts: Tensor) -> dict[str, float]:
    """The numbers of labels that `skew` explains, from the counts [clients, labels] in float64."""
    q = counts / counts.sum(1, keepdim=True)
    D = label_skew(counts)
    held = (counts > 0).sum(1).double()
    H = torch.special.entr(q).sum(1)
    return {
        "label_skew": float(D.mean()),
        "label_skew_max": float(D.max()),
        "labels_held": float(held.mean()),
        "effective_labels": float(H.mean().exp()),
    }


# ---- the table in text ----


def text(fed: Federation, width: int = 100) -> str:
    """A table with one line for each client, and below it the numbers in words.

    Args:
        fed: The federation.
        width: How many columns the terminal has, at least 40. No line is wider.

    Returns:
        Lines of text. A client's line has its labels as shades and its rows as a bar. Below the
        table stand the meaning of the signs, the numbers of `skew` in sentences, and the notes.

    Raises:
        InputError: The width is below 40.

    >>> from fedsso import Federation
    >>> pairs = [([[0.0]] * 4, [0, 0, 0, 1]), ([[0.0]] * 8, [1] * 8)]
    >>> fed = Federation.from_clients(pairs, client_names=["Ulm", "Graz"])
    >>> for line in text(fed, width=40).splitlines()[4:7]:
    ...     print(line)
    client  0  1    rows
    Ulm     ██ ▒▒      4  ███████░░
    Graz       ██      8  ██████████████░░░░
    """
    table, legend = _table(fed, integer("width", width, 40))
    lines = [*_wrapped(repr(fed), width), "", *table, ""]
    for said in (*legend, *_sentences(fed)):
        lines += _wrapped(said, width)
    for note in fed.notes:
        lines += _wrapped(f"note: {note}", width)
    return "\n".join(lines)


def _wrapped(line: str, width: int) -> list[str]:
    """A sentence as lines that are not too wide; from the second on they are indented."""
    return textwrap.wrap(line, width, subsequent_indent="  ")


def _table(fed: Federation, width: int) -> tuple[list[str], list[str]]:
    """The heading and the clients, and sentences that explain the signs.

    The columns are made one after the other, each from what is left of the width. Where targets
    are real numbers, there is no column of labels.
    """
    rows = rows_of(fed)
    shown = _shown(rows)
    all_names = names_of(fed)
    names = _name_column([all_names[i] for i in shown], min(16, width // 5))
    sizes = _right(["rows", *(str(int(rows[i])) for i in shown)])
    # Names, sizes and bars have two gaps of two blanks between them. The labels, if there are
    # any, bring a third gap.
    room = width - _columns(names[0]) - len(sizes[0]) - 4
    blocks = [names]
    legend: list[str] = []
    if fed.classes:
        labels, legend = _label_columns(fed, shown, room - BAR - 2)
        blocks.append(labels)
        room -= len(labels[0]) + 2
    bars = ["", *_bars(fed, shown, min(40, room))]
    blocks += [sizes, bars]
    table = ["  ".join(cells).rstrip() for cells in zip(*blocks, strict=True)]
    if len(fed.test_rows):
        legend.append("Bars: █ training rows, ░ test rows.")
    if len(shown) < fed.clients:
        half = LINES // 2
        table.insert(1 + half, "⋮")
        legend.append(
            f"The {half} largest and the {half} smallest clients; {fed.clients - LINES} between "
            f"them."
        )
    return table, legend


def _shown(rows: Tensor) -> list[int]:
    """All clients in their order; of many the largest and then the smallest, large first.

    `rows` are the sizes of the clients. Returns the numbers of the clients to show.
    """
    if len(rows) <= LINES:
        return list(range(len(rows)))
    order: list[int] = rows.argsort(descending=True, stable=True).tolist()
    half = LINES // 2
    return [*order[:half], *order[-half:]]


# ---- names ----


def names_of(fed: Federation) -> list[str]:
    """Names of the clients, or their numbers; what cannot be printed becomes a question mark.

    A name comes from a file and could hold control characters, which would act on the terminal.
    """
    if not fed.client_names:
        return [str(i) for i in range(fed.clients)]
    return [_printable(name) for name in fed.client_names]


def _printable(name: str) -> str:
    """A name with a question mark for each character that cannot be printed."""
    return "".join(sign if sign.isprintable() else "?" for sign in name)


def _name_column(names: Sequence[str], most: int) -> list[str]:
    """The heading and the names, cut to `most` columns and then padded to the same width."""
    short = [cut(name, most) for name in ("client", *names)]
    wide = max(map(_columns, short))
    return [name + " " * (wide - _columns(name)) for name in short]


def cut(name: str, most: int) -> str:
    """The name, its end replaced by an ellipsis where it is wider than `most` columns.

    >>> cut("Villingen", 6)
    'Villi…'
    """
    if _columns(name) <= most:
        return name
    while _columns(name) > most - 1:
        name = name[:-1]
    return name + "…"


def _columns(name: str) -> int:
    """Columns that a text takes: two for each Chinese, Japanese or Korean character."""
    return sum(2 if east_asian_width(sign) in "WF" else 1 for sign in name)


def _right(cells: Sequence[str]) -> list[str]:
    """Cells set to the right, all as wide as the widest one."""
    wide = max(map(len, cells))
    return [cell.rjust(wide) for cell in cells]


# ---- labels and bars ----


def _label_columns(
    fed: Federation,
    shown: Sequence[int],
    room: int,
) -> tuple[list[str], list[str]]:
    """A heading and a line of shades for each client, and sentences that explain them.

    Where labels outnumber the columns, neighbouring labels share one.

    Args:
        fed: The federation.
        shown: The numbers of the clients to show.
        room: How many columns of the terminal there are for the labels.

    Returns:
        The heading with one line for each client, all equally wide; and the sentences.
    """
    per = math.ceil(fed.classes / room)  # labels in a column
    wide = min(3, max(1, room // fed.classes))  # columns of the terminal for one of ours
    starts = np.arange(0, fed.classes, per)
    grouped = np.add.reduceat(shares_of(fed), starts, axis=1)
    top = float(grouped.max())
    lines = [_heading(grouped.shape[1], per, wide)]
    for i in shown:
        lines.append(
            "".join(
                _cell(
                    q,
                    top,
                    wide,
                )
                for q in grouped[i]
            )
        )
    bounds = []
    for shade, edge in zip(SHADES[:-1], EDGES, strict=True):
        bounds.append(f"{shade} < {top * edge:.2g}")
    legend = [f"Share of the client's rows: blank none, {', '.join(bounds)}, {SHADES[-1]} more."]
    if fed.class_names:
        named = [f"{number} {name}" for number, name in enumerate(map(_printable, fed.labels))]
        legend.append(f"Labels: {', '.join(named)}.")
    if per > 1:
        legend.append(f"A column is {per} neighbouring labels, headed by the first.")
    return lines, legend


def _cell(share: float, top: float, wide: int) -> str:
    """A share as a shade, `wide` columns with a gap where there are several.

    `top` is the largest share that any client has, and gets the darkest shade.
    """
    shade = " "
    if share:
        shade = SHADES[int(np.digitize(share / top, EDGES))]
    return (shade * max(1, wide - 1)).ljust(wide)


def _heading(columns: int, per: int, wide: int) -> str:
    """Labels above their columns, at even steps that leave a blank between two.

    Args:
        columns: How many columns of labels there are.
        per: How many labels share a column, which is named by the first of them.
        wide: How many columns of the terminal one of ours takes.
    """
    room = len(str((columns - 1) * per)) + 1
    whole = columns * wide
    steps = (1, 2, 5, 10, 20, 50, columns)
    step = next(step for step in steps if step * wide >= room)
    marks = [str(column * per) for column in range(0, columns, step)]
    if len(marks[-1]) > whole - (len(marks) - 1) * step * wide:
        marks[-1] = ""  # half a number would be another one
    text = "".join(mark.ljust(step * wide) for mark in marks)
    return text[:whole].ljust(whole)


def _bars(
    fed: Federation,
    shown: Sequence[int],
    length: int,
) -> list[str]:
    """Training rows dark and test rows light; the largest client's bar has the whole length.

    A client too small for a single block has a thin line, so that no bar is empty.
    """
    rows = rows_of(fed)
    train = fed.train_sizes.cpu()
    scale = length / int(rows.max())
    found = []
    for i in shown:
        dark = round(int(train[i]) * scale)
        end = round(int(rows[i]) * scale)
        found.append("█" * dark + "░" * (end - dark) or "▏")
    return found


def _sentences(fed: Federation) -> list[str]:
    """The numbers of `skew` in words: the sizes and, where there are labels, the labels."""
    f = skew(fed)
    sizes = (
        f"Rows of a client: {f['rows_min']} to {f['rows_max']}, median {f['rows_median']:g}; Gini "
        f"{f['size_gini']:.2f} "
        f"(0: equal sizes); the largest client's share {f['largest_share']:.3f}."
    )
    if not fed.classes:
        return [sizes]
    labels = (
        f"Label skew {f['label_skew']:.3f} (0: all alike, near 1: disjoint), "
        f"worst client {f['label_skew_max']:.3f}; "
        f"a client holds {f['labels_held']:.3g} of {fed.classes} labels on average, "
        f"as many as {f['effective_labels']:.3g} held equally."
    )
    return [sizes, labels]
