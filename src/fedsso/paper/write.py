"""How the paper's tables and pictures are written: Markdown and CSV, PNG and PDF.

Files are written whole or not at all, so that a command that is killed leaves no half page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from ..experiment.grids import axes
from ..report.tables import markdown
from ..support.files import records_to_csv, write_atomic

if TYPE_CHECKING:
    from pathlib import Path

    from ..experiment.results import Setting

PICTURES = (".png", ".pdf")
"""The formats of every picture: one for pages, one for print."""
SHORT = {"alpha": "α", "eta": "η", "mu": "μ", "local_steps": "τ"}
"""The paper's letters for hyper-parameters."""
SAID = ("guard", "form")
"""Settings that are part of a method's name, and are therefore not repeated."""


def save_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as CSV, with the names of the columns in the first line.

    A column that only some rows have is empty in the others, and so is None. Columns stand in the
    order in which the rows first have them.
    """
    write_atomic(path, records_to_csv(rows))


def save_text(path: Path, *parts: str) -> None:
    """Write paragraphs and tables as a Markdown file.

    There is an empty line between two parts, as Markdown wants it. Empty parts are left out, so
    that a caller need not ask whether there is a remark.
    """
    blocks = []
    for part in parts:
        if part:
            blocks.append(part.rstrip("\n") + "\n")
    write_atomic(path, "\n".join(blocks))


def save_picture(path: Path, draw: Callable[[Path], object]) -> None:
    """Write a picture in every format.

    Args:
        path: Where to write it, without a suffix.
        draw: Draws the picture and writes it. It is called once for each format, with the path
            that has the format's suffix.
    """
    for suffix in PICTURES:
        draw(path.with_suffix(suffix))


def settings(setting: Setting) -> str:
    """The hyper-parameters of a setting in short, as "α=0.01 η=0.3".

    Those that are tuned come first, then those that differ from their defaults.
    """
    shown = {}
    for name in axes(setting.algorithm):
        value = setting.spec.hyper[name]
        shown[name] = _short(value)
    for name, text in setting.spec.short.items():
        if name not in SAID:
            shown[name] = text
    pairs = []
    for name, text in shown.items():
        letter = SHORT.get(name, name)
        pairs.append(f"{letter}={text}")
    return " ".join(pairs)


def _short(value: object) -> str:
    """A hyper-parameter as text; a float without needless digits.

    >>> _short(0.30), _short("auto")
    ('0.3', 'auto')
    """
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def spread(values: Sequence[float | None], decimals: int = 1) -> str:
    """Mean ± standard deviation over seeds, as text.

    None means that a seed has no value: then a dash stands for the mean, followed by how many
    seeds have one, as in "– (3/5)". A mean over the other seeds would flatter a setting that fails
    with some.

    >>> spread([10, 12]), spread([10, None]), spread([None])
    ('11.0 ± 1.4', '– (1/2)', '–')
    """
    found = [value for value in values if value is not None]
    if not found:
        return "–"
    if len(found) < len(values):
        return f"– ({len(found)}/{len(values)})"
    if len(found) == 1:
        return _single(found[0], decimals)
    middle = f"{mean(found):.{decimals}f}"
    deviation = f"{stdev(found):.{decimals}f}"
    return f"{middle} ± {deviation}"


def _single(value: float, decimals: int) -> str:
    """One value as text; a whole number has no decimals."""
    if value == int(value):
        return f"{value:.0f}"
    return f"{value:.{decimals}f}"


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows as a Markdown table, or the word "none" where there are no rows."""
    if not rows:
        return "none\n"
    return markdown(rows)
