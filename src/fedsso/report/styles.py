"""The colour and the dashes of every algorithm: the same in all pictures and on the report page.

Algorithms that are related share a colour and differ in their dashes. The colours are those of
Okabe and Ito, with a few more, which colour-blind readers tell apart. An algorithm of the user's
own has a colour that no other algorithm has: one of four, by a hash of its name, so that it keeps
it from run to run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    "#6B6B6B": ("fedsgd", "ldsgd", "fedper", "harmofl"),
    "#332288": ("fedexp", "fedacg", "diloco", "servermuon"),
    "#004D40": ("aide", "disco", "mocha"),
    "#5C4A00": ("bl1", "bl2", "bl3"),
    "#661100": ("nl1", "nl2"),
}
"""The algorithms of each colour; their places decide their dashes."""

OWN = ("#A020F0", "#7F9F00", "#FF4FC3", "#00C853")
"""The colours of algorithms that are not in the table."""

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

    `algorithm` is its name in the registry. Any other text has a style, too, of a colour that no
    algorithm of the registry has.

    >>> style("fedsso")
    Style(color='#D55E00', linestyle='-')
    """
    for color, names in FAMILIES.items():
        if algorithm in names:
            return Style(color, DASHES[names.index(algorithm)])
    return _own(_place(algorithm))


def _place(algorithm: str) -> int:
    """The place of an algorithm of the user's own among `OWN`, by its name."""
    # Python's own `hash` of a text differs from process to process.
    digest = blake2b(algorithm.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % len(OWN)


def _own(place: int) -> Style:
    """The style at a place: first the colours with plain lines, then the same with dashes."""
    dashes = DASHES[place // len(OWN) % len(DASHES)]
    return Style(OWN[place % len(OWN)], dashes)


def looks(algorithms: Iterable[str]) -> dict[str, Style]:
    """The style of each algorithm of one picture, by its name.

    Two algorithms of the user's own whose names lead to one colour are told apart: in the order
    of their names, the second takes the next style that is free.
    """
    found: dict[str, Style] = {}
    for name in sorted(set(algorithms)):
        look = style(name)
        place = _place(name)
        while look in found.values() and look.color in OWN and place < 2 * len(OWN) * len(DASHES):
            place += 1
            look = _own(place)
        found[name] = look
    return found


def styles(
    curves: Sequence[Curve],
    given: Mapping[str, Style] | None = None,
) -> Iterator[Style]:
    """The style of each curve; several of one algorithm go from a dark shade to a light one.

    All curves of an algorithm keep its dashes, so that one can still tell whose they are.

    Args:
        curves: The curves, in their order.
        given: The style of each algorithm; None: that of `looks`.
    """
    count = Counter(curve.algorithm for curve in curves)
    known = looks(count) if given is None else given
    seen = Counter[str]()
    for curve in curves:
        name = curve.algorithm
        base = known[name]
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
