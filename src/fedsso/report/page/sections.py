"""The parts of the page that are written as HTML: cards, tables, notes and settings.

Whatever comes from a user (labels, titles, notes, settings) passes through `escape`. Each
function returns a piece of HTML, or an empty text where there is nothing to show; `document` puts
the pieces into the template. These parts are there without JavaScript, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from ...version import __version__
from ..tables import ENDS, FINAL, best_value, cell_values, remarks
from .view import FEW

if TYPE_CHECKING:
    from ..styles import Style
    from ..tables import Cell, Curve
    from .content import Recipe
    from .view import Item, View

UNITS = ("bytes", "kB", "MB", "GB", "TB")
REACHED = (
    "The first evaluated round that reaches it{seeds}. Megabytes are those of the whole "
    "federation, both ways. Headings sort."
)
ONE_SEED = "; a dash: it is not reached"
SEVERAL = ": mean ± standard deviation over the seeds; a dash: not every seed gets there"
BASE = "fedavg"  # the algorithm whose bytes the others are compared with

# ---- text, notes, settings ----


def paragraphs(text: str) -> str:
    """The introduction as HTML; blank lines part paragraphs."""
    parts = [part.strip() for part in text.split("\n\n")]
    return "\n".join(f"<p>{escape(part)}</p>" for part in parts if part)


def notes(texts: Sequence[str]) -> str:
    """What the reader should know about the runs, as a list. "" if there is nothing to tell."""
    if not texts:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<ul class="notes">{items}</ul>'


def recipes(every: Sequence[Recipe]) -> str:
    """The settings to reproduce, each folded up; many of them are folded up together once more."""
    if not every:
        return ""
    blocks = "\n".join(map(_recipe, every))
    if len(every) > FEW:
        blocks = f"<details><summary>{len(every)} settings</summary>\n{blocks}\n</details>"
    return f'<section id="settings"><h2>Settings to reproduce</h2>\n{blocks}\n</section>'


def _recipe(recipe: Recipe) -> str:
    """One block of settings, below the command that takes them, or why there is no command."""
    command = f'<p class="hint">{escape(recipe.why)}</p>' if recipe.why else ""
    if recipe.command:
        how = f"Save the settings below as {escape(recipe.file)}, then:"
        code = f"<pre><code>{escape(recipe.command)}</code></pre>"
        command = f'<p class="hint">{how}</p>{code}'
    text = f"<pre><code>{escape(recipe.text)}</code></pre>"
    return f"<details><summary>{escape(recipe.title)}</summary>{command}{text}</details>"


# ---- cards ----


def about(view: View) -> str:
    """What the page shows: the data, how many settings, runs and rounds, the version of fedsso.

    The rounds are those of the longest run. The text is not yet escaped.
    """
    runs = 0
    rounds = 0
    for item in view.items:
        for trace in item.curve.traces:
            runs += 1
            last = int(trace["round"].max(initial=0))
            rounds = max(rounds, last)
    names = list(dict.fromkeys(item.entry.data for item in view.items))
    if len(names) > 1:
        names = [_counted(len(names), "data set")]
    parts = [
        *filter(None, names),
        _counted(len(view.items), "setting"),
        _counted(runs, "run"),
        _counted(rounds, "round"),
        f"fedsso {__version__}",
    ]
    return " · ".join(parts)


def _counted(count: int, word: str) -> str:
    """A number and its word, in the plural unless the number is 1.

    >>> _counted(1, "run"), _counted(1200, "round")
    ('1 run', '1,200 rounds')
    """
    ending = "" if count == 1 else "s"
    return f"{count:,} {word}{ending}"


def cards(view: View) -> Iterator[str]:
    """The main findings, each with its sentence; no comparison of different federations.

    The last card counts the runs that diverged, of all curves, also of those in the background.
    """
    if not view.apart:
        yield from _findings(view)
    lost = 0
    runs = 0
    names: dict[str, None] = {}
    for item in view.items:
        runs += item.numbers["seeds"]
        diverged = len(item.numbers["diverged"])
        if diverged:
            lost += diverged
            names[item.algorithm] = None
    text = f"of {', '.join(names)}" if lost else "every run stayed finite"
    yield _card("Diverged", f"{lost} of {runs}", text)


def _findings(view: View) -> Iterator[str]:
    """The cards that compare settings: the best final accuracy, the fewest rounds, and the bytes.

    They are about the curves that are shown at first, so that each number is one of the table.
    Without any accuracy, the smallest final test loss takes the place of the best accuracy. A card
    is left out where there is nothing to compare: neither of the two, or no target that is
    reached.
    """
    judged = [item for item in view.shown if item.final is not None]
    if judged:
        # `end` is the accuracy with a minus sign, so that the least is the best.
        best = min(judged, key=lambda item: item.end)
        yield _card("Best final accuracy", f"{best.final:.4f}", best.label, best.look)
    known = [item for item in view.shown if item.loss is not None]
    if view.by_loss and known:
        best = min(known, key=lambda item: item.end)
        yield _card("Smallest final test loss", f"{best.loss:.4g}", best.label, best.look)
    if view.target is not None:
        yield _fastest(view, view.target)
        yield from _saved(view, view.target)


def _fastest(view: View, target: float) -> str:
    """The setting with the fewest rounds to the target, and the best of three other algorithms.

    Among settings with equally few rounds the best end decides. `target` is one that some setting
    reaches, as `View.target` is.
    """

    def order(item: Item) -> tuple[float, float]:
        return item.hits[target] or 0.0, item.end

    fastest: dict[str, Item] = {}
    able = [item for item in view.shown if item.reaches(target)]
    # In this order, the first setting of an algorithm is its fastest.
    for item in sorted(able, key=order):
        fastest.setdefault(item.algorithm, item)
    first, *others = fastest.values()
    said = []
    for item in others[:3]:
        rounds = _rounds(item.hits[target])
        said.append(f"{item.algorithm} {rounds}")
    text = first.label
    if said:
        text += f"; {', '.join(said)}"
    title = f"Fewest rounds to {target:g}"
    return _card(title, _rounds(first.hits[target]), text, first.look)


def _saved(view: View, target: float) -> Iterator[str]:
    """Bytes until the target, against FedAvg's best setting.

    There is no card where bytes were not counted, or where only one side reaches the target. The
    value is the change in per cent: −62 % if the other setting needs 38 bytes where FedAvg needs
    100. Among settings with equally few bytes the best end decides.
    """
    base: list[float] = []  # bytes of FedAvg's settings
    others: list[tuple[float, float, Item]] = []  # bytes and end of each other setting
    for item in view.shown:
        cost = _spent(item.curve, target)
        if not cost:
            continue
        if item.algorithm == BASE:
            base.append(cost)
        else:
            others.append((cost, item.end, item))
    if not base or not others:
        return
    usual = min(base)
    least, _, best = min(others, key=lambda one: one[:2])
    # With a true minus sign, which is as wide as the plus sign.
    share = f"{least / usual - 1:+.0%}".replace("-", "−")
    text = f"{best.label}: {_size(least)} to {target:g}, FedAvg {_size(usual)}"
    yield _card("Bytes against FedAvg", share, text, best.look)


def _card(
    name: str,
    value: str,
    text: str,
    look: Style | None = None,
) -> str:
    """A card: its name, a large value, and a sentence with the mark of a curve.

    With a `look`, a short line in this style stands before the sentence. All texts are escaped
    here.
    """
    mark = "" if look is None else swatch(look)
    return (
        f'<div class="card"><h3>{escape(name)}</h3><p class="value">{escape(value)}</p>'
        f"<p>{mark}{escape(text)}</p></div>"
    )


def _spent(curve: Curve, target: float) -> float | None:
    """Mean bytes of the whole federation until the target; None unless every seed gets there."""
    spent = [trace.bytes_to(target) for trace in curve.traces]
    found = [count for count in spent if count is not None]
    if len(found) < len(spent):
        return None
    return float(np.mean(found))


def _size(count: float) -> str:
    """Bytes with three figures, in a unit that suits; a kilobyte has 1000 bytes.

    >>> _size(2_250_000)
    '2.25 MB'
    """
    power = int(np.log10(max(count, 1)) // 3)
    power = min(len(UNITS) - 1, max(0, power))
    return f"{count / 1000**power:.3g} {UNITS[power]}"


def _rounds(value: float | None) -> str:
    """Rounds with at most one decimal; None is "never"."""
    return "never" if value is None else f"{round(value, 1):g}"


# ---- tables ----


def tables(view: View) -> str:
    """The table of all curves, with its heading.

    Where not all are drawn at first, those that are come first, and the whole is folded up.
    """
    every = view.items
    name = list(every[0].row)[-1]
    heading = "Rounds to an accuracy" if view.targets else "At the end"
    said = f"<h2>{heading}</h2>\n"
    if view.targets:
        several = any(item.numbers["seeds"] > 1 for item in every)
        told = REACHED.format(seeds=SEVERAL if several else ONE_SEED)
        said += f'<p class="hint">{told}</p>\n'
    said += f'<p class="hint">{name.capitalize()}: {ENDS}.</p>\n'
    for remark in remarks([item.curve for item in every], [item.row for item in every]):
        said += f'<p class="hint">{escape(remark)}</p>\n'
    if len(view.shown) == len(every):
        return said + _table(view, every, heading)
    title = "Drawn at first"
    # A few curves are all drawn at first, while others are in the background. They are called the
    # best only if there is one for each algorithm.
    if len(view.shown) == len(view.best(view.front)):
        title = "Best setting of each algorithm"
        if view.apart:
            title += " on each data set"
    whole = _table(view, every, "All settings")
    rest = f"<details><summary>All {len(every)} settings</summary>{whole}</details>"
    return said + _table(view, view.shown, title) + rest


def _table(
    view: View,
    items: Sequence[Item],
    title: str,
) -> str:
    """A table of some curves; the best of each column is marked unless data sets differ.

    Args:
        view: The page.
        items: The curves, at least one. All have the same columns.
        title: What the table is called. It is shown only if the page has two tables; programs
            that read a page aloud always have it.
    """
    names = list(items[0].row)
    # The best comes first: few rounds, few bytes, much accuracy.
    heads = [header(name, "descending" if name == FINAL else "ascending") for name in names]
    head = "".join(heads)
    cells = [cell_values(item.numbers, view.end_of(item)) for item in items]
    # Numbers of different data sets do not compare, so no cell is the best of its column.
    rivals = [] if view.apart else cells
    top = []
    for column, name in enumerate(names):
        values = [row[column] for row in rivals]
        top.append(best_value(name, values))
    lines = []
    for item, row in zip(items, cells, strict=True):
        lines.append(f"<tr>{_cells(item, row, top)}</tr>")
    body = "\n".join(lines)
    caption = ""
    if len(view.shown) < len(view.items):
        caption = f"<caption>{escape(title)}</caption>"
    return (
        f'<div class="table" tabindex="0" role="region" aria-label="{escape(title)}">'
        f"<table>{caption}<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def header(
    name: str,
    first: str = "ascending",
    mark: str = "",
) -> str:
    """The head of a column, and which way to sort it first.

    The button is for the script: a click sorts the rows by the `data-value` of their cells.

    Args:
        name: The name of the column.
        first: "ascending" or "descending", so that a first click brings the best to the top.
        mark: HTML that stands before the name.
    """
    button = f'<button type="button">{mark}{escape(name)}</button>'
    return f'<th scope="col" aria-sort="none" data-first="{first}">{button}</th>'


def _cells(
    item: Item,
    values: Sequence[Cell],
    top: Sequence[float | None],
) -> str:
    """The cells of a row, each with the value that it is sorted by.

    Args:
        item: The curve, whose texts fill the cells. The first cell is its label, with its mark.
        values: What each cell is sorted by. An empty value stays last, whichever way is sorted.
        top: The best value of each column, which is marked.
    """
    label, *texts = item.row.values()
    name = swatch(item.look) + escape(label)
    cells = [f'<th scope="row" data-value="{escape(label)}">{name}</th>']
    for text, value, best in zip(texts, values[1:], top[1:], strict=True):
        is_best = best is not None and value == best
        mark = ' class="best"' if is_best else ""
        key = "" if value is None else value
        cells.append(f'<td{mark} data-value="{key}">{escape(text)}</td>')
    return "".join(cells)


# ---- the mark of a curve ----


def dashes(look: Style, scale: float) -> list[float]:
    """The lengths of dashes and gaps in pixels; none for a plain line.

    `scale` is how many pixels a unit of matplotlib's dashes becomes.
    """
    if look.linestyle == "-":
        return []
    _, lengths = look.linestyle
    return [round(scale * length, 1) for length in lengths]


def swatch(look: Style) -> str:
    """A short line in the style of a curve, as a small drawing in SVG.

    `data-color` keeps the true colour: on a dark page the script draws the line in a brighter
    one.
    """
    lengths = " ".join(f"{length:g}" for length in dashes(look, 2))
    return (
        '<svg class="swatch" width="26" height="10" aria-hidden="true">'
        f'<line x1="1" y1="5" x2="25" y2="5" stroke="{look.color}" data-color="{look.color}" '
        f'stroke-width="3" stroke-dasharray="{lengths}"/></svg>'
    )
