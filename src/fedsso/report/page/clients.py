"""The table of clients: how well the final models serve each of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from ...errors import InputError
from .sections import header, swatch

if TYPE_CHECKING:
    from .content import Served
    from .view import Item, View


class _Column(NamedTuple):
    """A curve, and how well its models serve each client."""

    item: Item
    served: Served


def clients(view: View) -> str:
    """The section with a table for each federation; "" where no model could be asked.

    Columns are the curves that the page shows at first.
    """
    found: dict[str, list[_Column]] = {}  # by the name of the federation
    reasons: dict[str, None] = {}
    for item in view.shown:
        if item.entry.by_client is None:
            continue
        try:
            column = _Column(item, item.entry.by_client())
        except InputError as error:
            reasons[f"{item.label} is not shown: {error}."] = None
        else:
            found.setdefault(item.entry.data, []).append(column)
    if not found:
        return ""
    lines = ['<section id="clients"><h2>Client by client</h2>', _hint(found)]
    for name, columns in found.items():
        lines.append(_table(name if view.apart else "", columns))
    lines += [f'<p class="hint">{escape(reason)}</p>' for reason in reasons]
    return "\n".join([*lines, "</section>"])


def _hint(found: dict[str, list[_Column]]) -> str:
    """What the numbers are, in a sentence."""
    every = [column for columns in found.values() for column in columns]
    metrics = dict.fromkeys(column.served.metric for column in every)
    told = f"Test {' or '.join(metrics)} of the model after the last round, on each client's rows"
    if any(len(column.item.curve.traces) > 1 for column in every):
        told += ", mean over the seeds"
    if any(len(columns) > 1 for columns in found.values()):
        told += ". Marked: the best for this client"
    return f'<p class="hint">{told}.</p>'


def _table(name: str, columns: Sequence[_Column]) -> str:
    """The table of one federation; its name stands above it, if it is given."""
    first = columns[0].served
    heads = [header("client"), header("training rows"), header("test rows")]
    for item, served in columns:
        order = "descending" if served.metric == "accuracy" else "ascending"
        heads.append(header(item.label, order, swatch(item.look)))
    lines = []
    for place, client in enumerate(first.clients):
        values = [column.served.values[place] for column in columns]
        cells = [
            f'<th scope="row" data-value="{escape(client)}">{escape(client)}</th>',
            _count(first.train_rows[place]),
            _count(first.test_rows[place]),
            *_numbers(values, first.metric),
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    caption = f"<caption>{escape(name)}</caption>" if name else ""
    body = "\n".join(lines)
    return (
        '<div class="table" tabindex="0" role="region" aria-label="Client by client">'
        f"<table>{caption}<thead><tr>{''.join(heads)}</tr></thead>\n<tbody>\n{body}\n</tbody>"
        "</table></div>"
    )


def _count(rows: int) -> str:
    """A cell with a number of rows."""
    return f'<td data-value="{rows}">{rows:,}</td>'


def _numbers(values: Sequence[float], metric: str) -> list[str]:
    """The cells of one client; a client without test rows has a dash."""
    known = [value for value in values if math.isfinite(value)]
    best = math.nan
    if len(set(known)) > 1:  # where all are equal, none is the best
        best = max(known) if metric == "accuracy" else min(known)
    cells = []
    for value in values:
        mark = ' class="best"' if value == best else ""
        text = f"{value:.4g}"
        if metric == "accuracy":
            text = f"{value:.4f}"
        key = repr(value)
        if not math.isfinite(value):
            text = "–"
            key = ""
        cells.append(f'<td{mark} data-value="{key}">{text}</td>')
    return cells
