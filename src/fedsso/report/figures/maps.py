"""Grids of settings as heat maps: the darker a cell, the fewer rounds its setting needs.

Cells have the same size on all maps of a figure, so that grids of different sizes compare. Every
place is therefore computed here, in inches, and the layout engine of matplotlib is off. The scale
of colours is the same on all maps, too. A grey cell is a setting that does not reach the target,
a cross one of which a seed diverged, and a star the best of its map.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...errors import InputError, integer
from ...support import picture
from ..plots import CROSS
from ..styles import DARK, NEVER, SMALL

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, LogNorm
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

STAR: dict[str, Any] = {
    "marker": "*",
    "markersize": 11,
    "markeredgecolor": "white",
    "color": "#D55E00",
    "ls": "none",
}
FULL = 12.0  # inches that a row of maps may take
CELL = (0.42, 0.3)  # width and height of a cell in inches, where there is room
LEGIBLE = 0.3  # the narrowest cell that holds a number
LUMINANCE = (0.3, 0.59, 0.11)  # how bright red, green and blue look


class Heat(NamedTuple):
    """Rounds to a target over the settings of one algorithm.

    `Results.maps` makes these records from the runs of a sweep.
    """

    # The heading: the algorithm and the settings that all cells share.
    title: str
    # The hyper-parameter or run option that changes from row to row.
    down: str
    # The one that changes from column to column.
    across: str
    # The values of `down` as text, from top to bottom.
    rows: Sequence[str]
    # The values of `across` as text, from left to right.
    columns: Sequence[str]
    # Mean rounds, [rows, columns]. NaN where a setting does not reach the target with every seed.
    values: NDArray[Any]
    # Booleans, [rows, columns]: whether some seed of the setting diverges.
    lost: NDArray[Any]


class _Place(NamedTuple):
    """Where a map's cells lie, in inches from the upper left corner of the figure."""

    left: float
    top: float
    width: float
    height: float


class _Scale(NamedTuple):
    """How rounds become colours: `norm` takes rounds to 0..1, `colours` takes these to a colour."""

    norm: LogNorm
    colours: Colormap


def heat_maps(
    path: str | Path,
    maps: Sequence[Heat],
    *,
    title: str,
    most: int,
) -> None:
    """Draw a map of each algorithm's grid.

    Args:
        path: The file. Its suffix decides the format: .png, .pdf or .svg.
        maps: The grids, at least one.
        title: A heading for the picture.
        most: The rounds of a run, which is where the scale of colours ends.

    Raises:
        InputError: There is no map, one of them has no cell, its arrays have another shape than
            its rows and columns, its rounds are negative or beyond `most`, or the picture cannot
            be written.
    """
    if not maps:
        raise InputError("there is no map to draw; give at least one")
    integer("most", most, 1)
    for heat in maps:
        _check_heat(heat, most)
    picture.draw(path, lambda figure: _heat_maps(figure, maps, title, most))


def _check_heat(heat: Heat, most: int) -> None:
    """Refuse a map without cells, arrays of another shape, and rounds that cannot be."""
    wanted = (len(heat.rows), len(heat.columns))
    if 0 in wanted:
        raise InputError(
            f"map {heat.title!r} has {wanted[0]} rows and {wanted[1]} columns; give at least one "
            f"of each"
        )
    for name, cells in (("values", heat.values), ("lost", heat.lost)):
        if cells.shape != wanted:
            raise InputError(
                f"map {heat.title!r} needs {name} of shape {wanted}, got {cells.shape}"
            )
    within = (heat.values >= 0) & (heat.values <= most)
    if not np.all(np.isnan(heat.values) | within):
        raise InputError(f"map {heat.title!r} needs rounds from 0 to most={most}, or NaN for never")


# ---- the whole figure ----


def _heat_maps(
    figure: Figure,
    maps: Sequence[Heat],
    title: str,
    most: int,
) -> None:
    """Place the maps, draw them, and write the heading and the key.

    Cells shrink where the longest row of cells would be wider than the figure may be.
    """
    figure.set_layout_engine("none")  # cells of equal size: every place is known
    longest = max(len(heat.columns) for heat in maps)
    cell = min(CELL[0], (FULL - 2) / longest)
    places = _places(maps, (cell, cell * CELL[1] / CELL[0]))
    width = max(6.5, 0.3 + 0.105 * len(title))
    for heat, place in zip(maps, places, strict=True):
        width = max(width, _right(heat, place))
    height = max(place.top + place.height for place in places) + 1.7
    figure.set_size_inches(width, height)
    scale = _scale(maps, most)
    for heat, place in zip(maps, places, strict=True):
        # matplotlib counts in parts of the figure from the lower left corner.
        bottom = 1 - (place.top + place.height) / height
        box = (place.left / width, bottom, place.width / width, place.height / height)
        axes = figure.add_axes(box)
        _heat(axes, heat, scale, numbers=cell >= LEGIBLE)
    left = 0.15 / width
    top = 1 - 0.15 / height
    figure.text(left, top, title, va="top", fontsize=13, fontweight="bold")
    _foot(figure, scale, most)


def _places(
    maps: Sequence[Heat],
    cell: tuple[float, float],
) -> list[_Place]:
    """Places from left to right, and on to the next row where a map would not fit.

    Args:
        maps: The grids.
        cell: Width and height of a cell, in inches.

    Returns:
        Where the cells of each map lie. The names of its rows stand to the left of them.
    """
    wide, high = cell
    places: list[_Place] = []
    x = 0.0
    top = 0.75
    deepest = 0.0  # where the lowest map of this row ends
    for heat in maps:
        # Room for the name of the axis and for the longest name of a row.
        margin = 0.5 + 0.075 * max(map(len, heat.rows))
        width = wide * len(heat.columns)
        height = high * len(heat.rows)
        place = _Place(x + margin, top, width, height)
        if x and _right(heat, place) > FULL:
            top = deepest + 1.0
            deepest = 0.0
            # The first map of a row stays in it, however wide it is.
            place = place._replace(left=margin, top=top)
        places.append(place)
        x = _right(heat, place)
        deepest = max(deepest, top + place.height)
    return places


def _right(heat: Heat, place: _Place) -> float:
    """Where the next map may begin: cells and title both need their room.

    The width of the title is estimated from its length.
    """
    return place.left + max(place.width, 0.09 * len(heat.title)) + 0.15


def _scale(maps: Sequence[Heat], most: int) -> _Scale:
    """Colours from dark, for the fewest rounds on any map, to bright, for all of them.

    The scale is logarithmic, so that few rounds differ as much as many. It begins at one round at
    the earliest, because zero has no logarithm: an initial model that reaches the target has the
    darkest colour, too.
    """
    import matplotlib as mpl
    from matplotlib.colors import LogNorm

    # The two ends must differ, even if no setting reaches the target.
    least = most / 2
    for heat in maps:
        found = heat.values[heat.values >= 1]
        if found.size:
            least = min(least, float(found.min()))
    norm = LogNorm(least, most, clip=True)
    return _Scale(norm, mpl.colormaps["viridis"].with_extremes(bad=NEVER))


# ---- one map ----


def _heat(axes: Axes, heat: Heat, scale: _Scale, *, numbers: bool) -> None:
    """Draw the cells and axes of a map, with numbers in the cells where they have room.

    `pcolormesh` begins with the lowest row, so the axis is turned over. Where the cells are too
    narrow for numbers, the names of the columns are too wide as well, and are written upwards.
    """
    axes.pcolormesh(
        heat.values, cmap=scale.colours, norm=scale.norm, edgecolors="white", linewidth=1
    )
    axes.invert_yaxis()
    axes.set_title(heat.title, loc="left", fontsize=10, fontweight="bold")
    down = np.arange(len(heat.rows)) + 0.5
    across = np.arange(len(heat.columns)) + 0.5
    axes.set_yticks(down, heat.rows)
    axes.set_xticks(across, heat.columns, rotation=0 if numbers else 90)
    axes.set_xlabel(heat.across)
    axes.set_ylabel(heat.down, rotation=90 if len(heat.down) > 2 else 0)
    axes.tick_params(length=0, labelsize=SMALL)
    axes.spines[:].set_visible(False)
    if numbers:
        _numbers(axes, heat, scale)
    _signs(axes, heat, numbers=numbers)


def _numbers(axes: Axes, heat: Heat, scale: _Scale) -> None:
    """Write the rounds into the cells, in an ink that can be read on their colour."""
    text: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": SMALL}
    for row, column in np.argwhere(~np.isnan(heat.values)):
        value = heat.values[row, column]
        colour = scale.colours(scale.norm(value))[:3]
        bright = np.dot(colour, LUMINANCE) > 0.5
        ink = "#222222" if bright else "white"
        axes.text(
            column + 0.5,
            row + 0.54,
            f"{value:.0f}",
            color=ink,
            **text,
        )


def _signs(axes: Axes, heat: Heat, *, numbers: bool) -> None:
    """Draw stars and crosses, in a corner where the cell holds a number.

    Several cells have a star if they need equally few rounds. A map that never reaches the target
    has none.
    """
    never = np.isnan(heat.values)
    small = {**CROSS, "markersize": 6}
    for row, column in np.argwhere(heat.lost):
        if never[row, column] or not numbers:
            axes.plot(column + 0.5, row + 0.5, color=DARK, **CROSS)
        else:
            axes.plot(column + 0.84, row + 0.22, color=DARK, **small)
    if never.all():
        return
    x = 0.15 if numbers else 0.5
    y = 0.22 if numbers else 0.5
    for row, column in np.argwhere(heat.values == np.nanmin(heat.values)):
        axes.plot(column + x, row + y, clip_on=False, **STAR)


# ---- the key ----


def _foot(figure: Figure, scale: _Scale, most: int) -> None:
    """Draw the scale of colours, and explain grey cells, crosses and stars.

    The size of the figure must be final: all places are given in inches from its lower left
    corner.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    width, height = figure.get_size_inches()
    axes = figure.add_axes((0.4 / width, 0.62 / height, 2.9 / width, 0.14 / height))
    colours = ScalarMappable(scale.norm, scale.colours)
    bar = figure.colorbar(colours, cax=axes, orientation="horizontal")
    bar.set_label("rounds to the target (log scale)")
    bar.outline.set_visible(False)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if most <= 1000 else (1,)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.tick_params(labelsize=SMALL)
    handles = [
        Patch(color=NEVER, label=f"not with every seed in {most} rounds"),
        Line2D([], [], color=DARK, label="diverged", **CROSS),
        Line2D([], [], label="fewest rounds of its map", **STAR),
    ]
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(3.6 / width, 0.88 / height),
        frameon=False,
    )
