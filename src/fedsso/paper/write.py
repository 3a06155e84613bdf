"""Tables as Markdown and CSV, pictures as PNG and PDF."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from ..experiment.grids import axes
from ..experiment.results import Setting
from ..report.tables import markdown
from ..support.files import write_atomic

PICTURES = (".png", ".pdf")
SHORT = {"alpha": "α", "eta": "η", "mu": "μ", "local_steps": "τ"}
SAID = ("guard", "form")  # part of a method's name


def save_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows with the same keys, the first line their names; None is an empty cell."""
    text = io.StringIO()
    writer = csv.DictWriter(
        text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(path, text.getvalue())


def save_text(path: Path, *parts: str) -> None:
    """Paragraphs and tables of a Markdown file."""
    write_atomic(path, "\n".join(part.rstrip("\n") + "\n" for part in parts if part))


def save_picture(path: Path, draw: Callable[[Path], object]) -> None:
    """One picture in every format."""
    for suffix in PICTURES:
        draw(path.with_suffix(suffix))


def settings(setting: Setting) -> str:
    """The hyper-parameters in short, those that are tuned first, as α=0.01 η=0.3."""
    hyper, changed = setting.spec.hyper, setting.spec.short
    tuned = {name: hyper[name] for name in axes(setting.algorithm)}
    shown = {
        name: f"{value:g}" if isinstance(value, float) else str(value)
        for name, value in tuned.items()
    }
    shown |= {name: value for name, value in changed.items() if name not in SAID}
    return " ".join(f"{SHORT.get(k, k)}={v}" for k, v in shown.items())


def spread(values: Sequence[float | None], decimals: int = 1) -> str:
    """Mean ± standard deviation of the seeds; a dash and how many have a value, if not all."""
    found = [v for v in values if v is not None]
    if len(found) < len(values):
        return f"– ({len(found)}/{len(values)})" if found else "–"
    if len(found) == 1:
        return f"{found[0]:.{0 if found[0] == int(found[0]) else decimals}f}"
    return f"{mean(found):.{decimals}f} ± {stdev(found):.{decimals}f}"


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows as Markdown, or a word where there are none."""
    return markdown(rows) if rows else "none\n"
