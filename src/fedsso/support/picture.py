"""Pictures that all look alike, and are written whole or not at all.

matplotlib is imported only when a picture is drawn, because it is optional. Its global settings are
not changed. The same input gives the same file, byte by byte.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, unknown
from .files import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARK = "drawn by fedsso"
# What is written into a file beside the picture. There is no date, so the same input gives the
# same file.
FORMATS = {
    ".png": {"Software": MARK},
    ".pdf": {"Creator": MARK, "CreationDate": None},
    ".svg": {"Creator": MARK, "Date": None},
}
# How every picture looks: the settings of matplotlib.
LOOK = {
    "font.size": 10,
    # A dollar sign in a label is a dollar sign, and does not begin a formula.
    "text.parse_math": False,
    "text.color": "#222222",
    "axes.labelcolor": "#222222",
    "axes.edgecolor": "#999999",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "svg.hashsalt": "fedsso",
    # Letters stay letters in a PDF, of a kind that publishers take.
    "pdf.fonttype": 42,
}


def draw(
    path: str | Path,
    onto: Callable[[Figure], None],
    rc: Mapping[str, Any] | None = None,
) -> Path:
    """Let a function draw onto an empty figure, and write the figure to a file.

    Args:
        path: Where the picture goes. Its suffix decides between PNG, PDF and SVG.
        onto: Draws; it gets an empty figure with the look of all pictures.
        rc: Settings of matplotlib that differ from those of all pictures, by name.

    Returns:
        The path.

    Raises:
        InputError: The suffix or a setting is not known, matplotlib is not installed, or the file
            cannot be written.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise unknown("picture format", suffix, FORMATS)
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        raise InputError("a picture needs matplotlib: pip install matplotlib") from None
    look = {**LOOK, **_checked(rc or {})}
    buffer = BytesIO()
    with mpl.rc_context(look), warnings.catch_warnings():  # type: ignore[arg-type]
        figure = Figure(layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.07))
        onto(figure)
        # A client may have a name in a script that the font lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure.savefig(buffer, format=suffix[1:], dpi=150, metadata=FORMATS[suffix])
    write_atomic(path, buffer.getvalue())
    return Path(path)


def _checked(rc: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings of matplotlib; a name or a value that it does not take is an InputError."""
    from matplotlib import RcParams, rcParams

    for name, value in rc.items():
        if name not in rcParams:
            raise InputError(
                f"matplotlib has no setting {name!r}; font.size is one, matplotlib.rcParams has all"
            )
        try:
            RcParams({name: value})
        except (ValueError, TypeError) as error:
            raise InputError(f"rc[{name!r}]: {error}") from None
    return rc
