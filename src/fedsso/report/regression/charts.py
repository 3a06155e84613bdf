"""Drawings in SVG, without scripts: calibration and ROC curves by hospital, and convergence.

Colours are those of the page's style sheet (`s0`, `s1`, ... for hospitals), so that a drawing suits
light and dark pages and paper. A point tells its numbers where the mouse rests on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from math import ceil, floor, isfinite, log10
from typing import TYPE_CHECKING, NamedTuple

from .steps import round_step

if TYPE_CHECKING:
    from ...regression.records import Assessment, Round

WIDE = 390
HIGH = 320
LEFT = 62
RIGHT = 12
TOP = 10
BOTTOM = 44
COLOURS = 9
"""Hospitals that have a colour of their own; the others are grey."""
SPAN = 1e-12
"""The least that a logarithmic axis goes down to, as a part of its top."""


class Point(NamedTuple):
    """A point of a curve, and what it tells."""

    x: float
    y: float
    told: str = ""


class Curve(NamedTuple):
    """A line with points."""

    name: str
    points: Sequence[Point]
    joined: bool = True


class Scale(NamedTuple):
    """An axis: its ends, and the numbers beside it."""

    low: float
    high: float
    ticks: Sequence[float]
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """Where a value lies, from 0 to 1."""
        if self.logarithmic:
            return (log10(value) - log10(self.low)) / (log10(self.high) - log10(self.low))
        return (value - self.low) / (self.high - self.low)


def calibration(hospitals: Sequence[Assessment], what: str, lines: bool = True) -> str:
    """Observed against expected outcome, in groups of similar prediction; "" if there are none.

    Without `lines` the points are not joined: events of survival data depend on the time at risk.
    """
    curves = []
    for one in hospitals:
        points = []
        for group in sorted(one.calibration, key=lambda group: group.expected):
            told = (
                f"{one.hospital}: {group.rows} rows, expected {group.expected:.3g}, observed "
                f"{group.observed:.3g}"
            )
            points.append(Point(group.expected, group.observed, told))
        curves.append(Curve(one.hospital, points, lines))
    values = [value for curve in curves for point in curve.points for value in point[:2]]
    if not values:
        return ""
    low = min(values)
    high = max(values)
    # Counts and shares begin at 0; a temperature would be a dot in a corner then.
    scale = linear(0.0 if 0 <= low < high / 2 else low, high)
    title = f"Calibration: observed against expected {what}, hospital by hospital"
    return drawing(title, curves, (scale, scale), (f"expected {what}", f"observed {what}"), True)


def roc(hospitals: Sequence[Assessment]) -> str:
    """Sensitivity against 1 - specificity; "" if there are no such curves."""
    curves = []
    for one in hospitals:
        points = [Point(0.0, 0.0)]
        for at in sorted(one.roc, key=lambda threshold: -threshold.threshold):
            told = (
                f"{one.hospital}, probability from {at.threshold:.2g} on: sensitivity "
                f"{at.sensitivity:.3g}, specificity {at.specificity:.3g}"
            )
            points.append(Point(1 - at.specificity, at.sensitivity, told))
        points.append(Point(1.0, 1.0))
        curves.append(Curve(one.hospital, points if one.roc else []))
    if not any(curve.points for curve in curves):
        return ""
    scale = linear(0.0, 1.0)
    title = "ROC curves, hospital by hospital"
    return drawing(title, curves, (scale, scale), ("1 − specificity", "sensitivity"), True)


def convergence(trace: Sequence[Round], what: str, value: Callable[[Round], float]) -> str:
    """A number of each round that falls to 0, on a logarithmic axis; "" if it never is above 0."""
    points = []
    for one in trace:
        height = value(one)
        if isfinite(height) and height > 0:
            points.append(Point(one.round, height, f"round {one.round}: {height:.3g}"))
    top = max((point.y for point in points), default=0.0)
    points = [point for point in points if point.y >= SPAN * top]
    if len(points) < 2 or trace[-1].round <= trace[0].round:
        return ""
    rounds = Scale(trace[0].round, trace[-1].round, _whole_ticks(trace[0].round, trace[-1].round))
    heights = logarithmic(min(point.y for point in points), top)
    curve = Curve(what, points)
    return drawing(f"{what} by round", [curve], (rounds, heights), ("round", what), False)


# ---- axes ----


def linear(low: float, high: float) -> Scale:
    """An axis from a round number below to one above."""
    if high <= low:
        high = low + 1.0
    step = round_step((high - low) / 5)
    first = floor(low / step + 1e-9)
    last = ceil(high / step - 1e-9)
    ticks = [step * k for k in range(first, last + 1)]
    return Scale(ticks[0], ticks[-1], ticks)


def logarithmic(low: float, high: float) -> Scale:
    """An axis of powers of ten."""
    first = floor(log10(low))
    last = max(ceil(log10(high)), first + 1)
    every = ceil((last - first) / 6)
    ticks = [10.0**k for k in range(first, last + 1, every)]
    return Scale(10.0**first, 10.0**last, ticks, True)


def _whole_ticks(first: int, last: int) -> list[float]:
    """Whole numbers between two, few enough to be read."""
    step = max(1, round(round_step((last - first) / 6)))
    return [float(k) for k in range(first, last + 1) if k % step == 0]


# ---- drawing ----


def drawing(
    title: str,
    curves: Sequence[Curve],
    scales: tuple[Scale, Scale],
    names: tuple[str, str],
    diagonal: bool,
) -> str:
    """An SVG with axes and curves. With `diagonal`, a dashed line shows where both are equal."""
    across, up = scales
    parts = [*_axes(across, up, names)]
    if diagonal:
        ends = [Point(up.low, up.low), Point(up.high, up.high)]
        parts.append(f'<polyline class="even" points="{_path(ends, across, up)}"/>')
    for number, curve in enumerate(curves):
        if curve.points:
            parts.append(_curve(curve, look(number, len(curves)), across, up))
    inner = "\n".join(parts)
    return (
        f'<svg class="plot" viewBox="0 0 {WIDE} {HIGH}" role="img" aria-label="{escape(title)}">\n'
        f"{inner}\n</svg>"
    )


def look(number: int, many: int) -> str:
    """The class of a hospital's lines: a colour of its own, or grey."""
    if many == 1:
        return "s0"
    return f"s{number}" if number < COLOURS else "other"


def _x(value: float, across: Scale) -> float:
    return LEFT + across.share(value) * (WIDE - LEFT - RIGHT)


def _y(value: float, up: Scale) -> float:
    return HIGH - BOTTOM - up.share(value) * (HIGH - TOP - BOTTOM)


def _path(points: Sequence[Point], across: Scale, up: Scale) -> str:
    """The points of a line in the units of the drawing."""
    return " ".join(f"{_x(point.x, across):.1f},{_y(point.y, up):.1f}" for point in points)


def _curve(curve: Curve, style: str, across: Scale, up: Scale) -> str:
    """A line, and a circle for each point that tells something."""
    parts = [f'<g class="{style}">']
    if curve.joined:
        parts.append(f'<polyline points="{_path(curve.points, across, up)}"/>')
    for point in curve.points:
        if point.told:
            place = f'cx="{_x(point.x, across):.1f}" cy="{_y(point.y, up):.1f}"'
            parts.append(f'<circle {place} r="3"><title>{escape(point.told)}</title></circle>')
    parts.append("</g>")
    return "".join(parts)


def _axes(across: Scale, up: Scale, names: tuple[str, str]) -> list[str]:
    """Grid lines with their numbers, and what the axes show."""
    low = HIGH - BOTTOM
    parts = []
    for tick in across.ticks:
        x = _x(tick, across)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{low}"/>')
        text = _text(tick, across)
        parts.append(f'<text x="{x:.1f}" y="{low + 16}" text-anchor="middle">{text}</text>')
    for tick in up.ticks:
        y = _y(tick, up)
        parts.append(
            f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDE - RIGHT}" y2="{y:.1f}"/>'
        )
        text = _text(tick, up)
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    middle = (LEFT + WIDE - RIGHT) / 2
    height = (TOP + HIGH - BOTTOM) / 2
    parts.append(
        f'<text class="name" x="{middle:.0f}" y="{HIGH - 8}" text-anchor="middle">'
        f"{escape(names[0])}</text>"
    )
    parts.append(
        f'<text class="name" transform="translate(13 {height:.0f}) rotate(-90)" '
        f'text-anchor="middle">{escape(names[1])}</text>'
    )
    return parts


def _text(tick: float, scale: Scale) -> str:
    """The number at a tick; a power of ten with its exponent raised, where it is far from 1."""
    if scale.logarithmic and not 0.001 <= tick <= 1000:
        return f'10<tspan dy="-4" font-size="9">{round(log10(tick))}</tspan>'
    return f"{tick:.6g}"
