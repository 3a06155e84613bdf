"""The colour and the dashes of every algorithm: the same in all pictures and on the report page.

Algorithms that are related share a colour and differ in their dashes. The colours are those of
Okabe and Ito, with three more, which colour-blind readers tell apart. An algorithm that is not in
the table gets a colour and dashes by a hash of its name, so that it keeps them from run to run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .tables import Curve

FAMILIES = {
    "#D55E00": ("fedsso", "fedsophia", "fednew"),
    "#0072B2": ("fedavg", "fedprox", "fednova", "fedavgm"),
    "#009E73": ("feddane", "dane", "done", "giant"),
    "#CC79A7": ("fednl", "fednl-ls", "fednl-pp"),
    "#E69F00": ("fedac", "stem", "anderson", "fedvarp"),
    "#56B4E9": ("scaffold", "localnewton", "fedpm", "mifa"),
    "#882255": ("fedadam", "fedyogi", "fedadagrad", "serverlion"),
    "#6B6B6B": ("fedsgd", "ldsgd", "fedper"),
    "#332288": ("fedexp", "fedacg", "diloco", "servermuon"),
}
"""The algorithms of each colour; their places decide their dashes."""

DASHES: tuple[Any, ...] = (
    "-",
    (0, (5, 2)),
    (0, (1.2, 1.4)),
    (0, (6, 2, 1.2, 2)),
)
"""Line styles of matplotlib: a plain line, then offsets with the lengths of dashes and gaps."""

SMALL = 8  # points of the small print
DARK = "#444444"  # of marks and error bars
GREY = "#666666"  # of what belongs to several algorithms
NEVER = "#E2E2E2"  # of a setting that does not reach the target


class Style(NamedTuple):
    """How the line of an algorithm looks."""

    color: str
    linestyle: Any


def style(algorithm: str) -> Style:
    """The colour and dashes of an algorithm, the same in every picture.

    `algorithm` is its name in the registry. Any other text has a style, too.

    >>> style("fedsso")
    Style(color='#D55E00', linestyle='-')
    """
    for color, names in FAMILIES.items():
        if algorithm in names:
            return Style(color, DASHES[names.index(algorithm)])
    # Python's own `hash` of a text differs from process to process.
    digest = blake2b(algorithm.encode(), digest_size=4).digest()
    number = int.from_bytes(digest, "big")
    colors = list(FAMILIES)
    color = colors[number % len(colors)]
    dashes = DASHES[number // len(colors) % len(DASHES)]
    return Style(color, dashes)


def styles(curves: Sequence[Curve]) -> Iterator[Style]:
    """The style of each curve; several of one algorithm go from a dark shade to a light one.

    All curves of an algorithm keep its dashes, so that one can still tell whose they are.
    """
    count = Counter(curve.algorithm for curve in curves)
    seen = Counter[str]()
    for curve in curves:
        name = curve.algorithm
        base = style(name)
        if count[name] > 1:
            # From -0.4, which is mixed with black, to 0.5, mixed with white: both ends can be
            # seen.
            light = 0.9 * seen[name] / (count[name] - 1) - 0.4
            base = base._replace(color=shade(base.color, light))
        seen[name] += 1
        yield base


def shade(color: str, light: float) -> str:
    """A colour mixed with white for `light` > 0, with black for `light` < 0; 1 is all white.

    `color` is written as "#RRGGBB", and so is the result. `light` lies between -1 and 1.

    >>> shade("#0072B2", 0.5)
    '#80B8D8'
    """
    goal = 255 if light > 0 else 0
    mixed = "#"
    for start in (1, 3, 5):
        part = int(color[start : start + 2], 16)
        mixed += f"{round(part + abs(light) * (goal - part)):02X}"
    return mixed
