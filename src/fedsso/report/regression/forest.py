"""The forest plot as a picture for a paper."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import InputError
from ...regression.result import printed
from ...support import picture
from ..federation import cut
from ..plots import heading
from .steps import axis_of, shown, steps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ...regression.result import Regression
    from .steps import Axis, Step

COLOUR = "#0072B2"


def plot(path: str | Path, result: Regression, level: float, title: str = "") -> None:
    """Draw all coefficients but the intercept, with intervals, and write the picture.

    Raises:
        InputError: There is no coefficient to draw, the format is not PNG, PDF or SVG, the file
            cannot be written, or matplotlib is not installed.
    """
    lines = steps(result, level)
    if not lines:
        raise InputError("there is no coefficient to draw beside the intercept")
    picture.draw(path, lambda figure: _draw(figure, result, lines, level, title))


def _draw(
    figure: Figure,
    result: Regression,
    lines: list[Step],
    level: float,
    title: str,
) -> None:
    """Draw names at the left, intervals in the middle, numbers at the right."""
    ratio = result.family.ratio
    axis = axis_of(lines, bool(ratio))
    figure.set_size_inches(8, 1.3 + 0.3 * len(lines))
    axes = figure.subplots()
    heading(figure, cut(title or printed.title_of(result), 80))
    for place, line in enumerate(lines):
        _interval(axes, place, line, axis)
        numbers = [shown(value, bool(ratio)) for value in (line.value, line.low, line.high)]
        axes.text(
            1.02,
            place,
            f"{numbers[0]} [{numbers[1]}, {numbers[2]}]",
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=9,
        )
    names = [cut(f"{line.label}  {line.detail}".strip(), 40) for line in lines]
    axes.set_yticks(range(len(lines)), names)
    axes.set_xticks([place for place, _ in axis.ticks], [text for _, text in axis.ticks])
    axes.set(xlim=(axis.low, axis.high), ylim=(len(lines) - 0.4, -0.6))
    what = ratio or "difference of the outcome"
    axes.set_xlabel(f"{what}, with {printed.percent(level)} intervals")
    axes.grid(True, axis="x")
    axes.axvline(0, color="#555555", lw=1)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _interval(axes: object, place: int, line: Step, axis: Axis) -> None:
    """One interval with its estimate; an arrow where it goes on beyond the axis."""
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    low = max(line.low, axis.low)
    high = min(line.high, axis.high)
    axes.plot([low, high], [place, place], color=COLOUR, lw=1.8, solid_capstyle="butt")
    if line.low < axis.low:
        axes.plot(axis.low, place, "<", color=COLOUR, markersize=6, clip_on=False)
    if line.high > axis.high:
        axes.plot(axis.high, place, ">", color=COLOUR, markersize=6, clip_on=False)
    if axis.low <= line.value <= axis.high:
        axes.plot(line.value, place, "s", color=COLOUR, markersize=6)
